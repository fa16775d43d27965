"""Where the seconds of a run with kills went, and the formula beside it."""

import json
import random

import pytest

from xtrain.bench.goodput import measure, restarts, row, simulated
from xtrain.plan import goodput


def note(kind: str, step: int, begin: float, end: float) -> dict:
    return {"kind": kind, "step": step, "begin": begin, "end": end}


NOTES = [
    note("step", 1, 10, 12), note("step", 2, 12, 14), note("save", 2, 14, 15),
    note("step", 3, 15, 17),  # redone; killed at 18, 20 and 40
    note("step", 3, 30, 32), note("step", 4, 32, 34), note("save", 4, 34, 37),
    note("step", 5, 37, 39), note("step", 5, 50, 52), note("step", 6, 52, 54),
    note("save", 6, 54, 56),
]  # fmt: skip
KILLS = [18.0, 20.0, 40.0]


@pytest.mark.verifies("xtrain.bench.goodput:row")
def test_seconds_are_kept_redone_or_saving_and_the_rest_is_restarts(tmp_path):
    lines = [json.dumps(one) for one in NOTES]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    found = row(tmp_path, 2, 20.0, KILLS)
    assert (found["steps"], found["kills"], found["wall"]) == (6, 3, 46)
    assert (found["useful"], found["saving"], found["redone"]) == (12, 6, 4)
    assert (found["step"], found["checkpoint"], found["restart"]) == (2, 2, 10)
    assert found["measured"] == 12 / 46
    assert found["formula"] == goodput(4, 2, 20, 10)
    assert found["simulated"][0] < goodput(4, 2, 20, 10) < found["simulated"][1]


@pytest.mark.verifies("xtrain.bench.goodput:simulated")
def test_many_simulated_runs_have_the_formulas_share():
    known = 4.0, 2.0, 20.0, 10.0
    share = simulated(20_000, *known, random.Random(1))
    assert share == pytest.approx(goodput(*known), rel=0.02)


@pytest.mark.verifies("xtrain.bench.goodput:restarts")
def test_a_restart_that_is_killed_itself_is_not_one():
    steps = [one for one in NOTES if one["kind"] == "step"]
    assert restarts(steps, KILLS) == [10, 10]
    assert restarts(steps, []) == [] and restarts(steps, [60.0]) == []


@pytest.mark.slow
def test_runs_with_kills_end_and_have_the_formulas_share():
    for found in measure(work=20.0, between=12.0, seed=random.randrange(2**32)):
        assert 0 < found["measured"] < 1
        low, high = found["simulated"]
        assert low * 0.7 < found["measured"] < high * 1.3
