"""What the page on one run says of its curve and of its timeline."""

import json
import re
from types import SimpleNamespace

import pytest

from xtrain_docs.lectures.lc8 import one_run

AXES = {"all_gather": "data", "reduce_scatter": "data", "all_reduce": "tensor"}


@pytest.fixture(scope="module")
def steps():
    """A step of ranks that are alike, and one with a slow rank."""
    return SimpleNamespace(alike=one_run.traced(0.0), slow=one_run.traced(one_run.LATE))


def test_four_ranks_have_the_curve_of_one_process():
    one, four = one_run.curves()
    assert len(one) == len(four) == 24
    for (loss, norm), (ours, our_norm) in zip(one, four, strict=True):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert our_norm == pytest.approx(norm, rel=1e-9)
    losses = [loss for loss, _ in one]
    assert losses[13] > losses[12] > losses[11] + 0.2, "the page explains this rise"
    assert one[13][1] > 2 * one[11][1]
    assert losses[14] < losses[11] + 0.05


def test_the_slow_rank_waits_least(steps):
    first, second, neighbour, slow = steps.slow["waits"]
    assert slow < min(first, second, neighbour) - 0.05
    assert max(steps.alike["waits"]) - min(steps.alike["waits"]) < 0.001
    assert steps.slow["ends"][-1] > steps.alike["ends"][-1] + 2.9 * one_run.LATE
    longest = max(steps.slow["spans"], key=lambda s: (s[0] == "wait", s[2] - s[1]))
    assert longest[2] - longest[1] > 2 * one_run.LATE
    assert "float32, SUM) in group 0, 2" in longest[3], "the loss over data ranks"


def test_phases_wait_for_the_ranks_that_the_page_names(steps, monkeypatch):
    monkeypatch.setattr(one_run, "trace", lambda slow=False: steps.alike)
    forward, backward, clip, optimizer = one_run.one_run_phases().rows
    numbers = [
        [float(re.match(r"[\d.]+", cell.replace("\u00a0", " "))[0]) for cell in row[1:]]
        for row in (forward, backward, clip, optimizer)
    ]
    (_, tensor, data, none), (_, behind, _, _) = numbers[:2]
    assert tensor > data > none == 0
    assert behind < tensor / 2, "all-reduces of backward run behind computation"
    assert numbers[2][1:3] == [0, 0] < numbers[2][3:]
    assert numbers[3][1:] == [0, 0, 0]
    counts = [
        sum(a < end for _, axis, a, end in steps.alike["sent"] if axis == "tensor")
        for a in steps.alike["ends"][:1]
    ]
    assert counts[0] >= 2 * one_run.MODEL.num_hidden_layers
    drawing = one_run.one_run_step()
    assert all(word in drawing for word in ("forward", "backward", "clip, optimizer"))
    assert all(f"{kind} over {axis}" in drawing for kind, axis in AXES.items())
    events = json.loads(steps.alike["trace"])["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
