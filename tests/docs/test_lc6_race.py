"""The page of races: a critical path counted in real runs, and reasons of misses."""

import dataclasses

import pytest

from tests.bench.test_record import MEASUREMENT, RECORD, RESULT
from xtrain.bench import attention
from xtrain.bench.races import lc6
from xtrain_docs import races
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import race


def test_the_ranks_wait_for_as_many_pairs_as_the_closed_forms_say(on_ranks):
    for ranks in (2, 3, 8):
        paths = {b: race.critical_path(b, ranks)[0] for b in race.BALANCES}
        assert paths["zigzag"] < paths["striped"] < paths["none"]
    rows = {row[0]: row for row in race.ring_critical_path(8).rows}
    assert rows["zigzag"][-1] == "met"
    assert rows["zigzag"][2] == "1.000"


def test_a_critical_path_that_is_not_the_formula_stops_the_build(on_ranks, monkeypatch):
    monkeypatch.setattr(race, "critical_pairs", lambda balance, ranks, tokens: 1)
    with pytest.raises(EvidenceError, match="zigzag on 2 ranks"):
        race.critical_path("zigzag", 2)


def measured(race, ranks, baseline, load=0.5, **seconds):
    """A measurement in which each contestant took so many seconds."""
    results = [
        dataclasses.replace(
            RESULT, name=name, seconds=took, ratio=baseline / took, goal=None
        )
        for name, took in {"baseline": baseline, **seconds}.items()
    ]
    return dataclasses.replace(
        MEASUREMENT, race=race, ranks=ranks, results=results, other_load=load
    )


def test_a_miss_has_a_reason_from_the_same_measurement():
    blocks = measured("tiles_causal", 1, 3.0, **{"fused blocks": 2.2, "SDPA": 2.0})
    assert "reaches 1.5x, so no cut" in race.reason(blocks, 1.8)
    assert "cutting and merging cost 10 %" in race.reason(blocks, 1.8)
    assert "no cut" not in race.reason(blocks, 1.4)
    names = {"one process": 1.0, "ring": 0.75, "ring on xtrain-shm": 0.6}
    said = race.reason(measured("causal_long", 2, 1.0, **names), 1.6)
    assert "time is 500 ms; the ring takes 250 ms more on gloo, 100 ms more" in said
    assert "others used 50 % of the machine" in said
    asleep = race.reason(measured("sleeping", 8, 1.0, zigzag=0.8), 1.6)
    assert "differ 1.87x; zigzag sleeps 411 ms" in asleep


def test_the_sleeping_blocks_are_those_of_the_counted_ring():
    assert attention.size_of(8 * race.LENGTH) == lc6.SLEEP


def test_only_missed_goals_are_listed(monkeypatch, tmp_path):
    found = measured("tiles_full", 1, 3.0, **{"fused blocks": 2.0, "SDPA": 1.9})
    goals = [dataclasses.replace(r, goal=g) for r, g in
             zip(found.results, (None, 1.6, 1.4), strict=True)]  # fmt: skip
    made_up = dataclasses.replace(
        RECORD, measurements=[dataclasses.replace(found, results=goals)]
    )
    monkeypatch.setattr(races, "record", lambda name: made_up)
    assert [row[1:3] for row in race.attention_misses().rows] == [["1.6x", "1.5x"]]
