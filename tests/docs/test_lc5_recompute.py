"""Figures and tables on activation recompute are what ran, or stop the build."""

import pytest

from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import recompute

LIBRARY = "xtrain.pipeline_parallel.recompute:checkpoint"


def number(cell):
    return int(cell.replace("\u00a0", ""))


@pytest.mark.verifies(LIBRARY)
def test_for_transformer_layers_the_smallest_segments_need_least(on_ranks):
    rows = recompute.recompute_bytes(4, (1, 2, 4)).rows
    kept, alive = ([number(row[i]) for row in rows] for i in (1, 3))
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    none, *segments = alive
    assert segments == sorted(segments) and len(set(segments)) == 3
    assert segments[0] < none / 3
    assert all(abs(number(row[4]) - number(row[3])) < 2000 for row in rows)


@pytest.mark.verifies(LIBRARY)
def test_recompute_adds_one_forward_to_three(on_ranks):
    rows = recompute.recompute_flops(2).rows
    assert [row[2] for row in rows] == ["3", "4", "3.75"]


@pytest.mark.verifies(LIBRARY)
def test_the_picture_has_every_end_of_a_layers_run(on_ranks):
    drawing = recompute.recompute_memory(6, (0, 1))
    lines = [part.split('"')[1] for part in drawing.split("<polyline")[1:]]
    lines = [line.partition('"')[0].split() for line in lines]
    assert [len(line) for line in lines] == [12, 18]
    assert "backward begins" in drawing


def test_runs_of_a_segment_lie_between_two_backwards():
    kinds = ["forward", "forward", "again", "again", "backward", "backward"]
    points = recompute.placed([(kind, 0, 2**20) for kind in kinds])
    assert [round(at, 2) for at, _ in points] == [1, 2, 2.33, 2.67, 3, 4]


def test_selective_recompute_saves_most_for_little():
    none, selective, full = recompute.recompute_selective().rows
    assert number(full[1]) < number(selective[1]) < number(none[1]) / 3
    assert [row[3] for row in (none, selective, full)] == ["0.0 %", "0.9 %", "33.3 %"]


def test_what_differs_from_a_form_stops_the_build(monkeypatch):
    numbers = {(4, 0): 400, (1, 0): 100, (1, 1): 10, (4, 1): 40}
    monkeypatch.setattr(recompute, "kept", lambda count, each: numbers[count, each])
    events = {0: 410, 1: 150}
    monkeypatch.setattr(
        recompute, "measured", lambda _, each: [("forward", 0, events[each])]
    )
    assert len(recompute.recompute_bytes(4, (1,)).rows) == 2
    for store, key in ((numbers, (4, 0)), (numbers, (4, 1)), (events, 0), (events, 1)):
        right = store[key]
        store[key] += 10
        with pytest.raises(EvidenceError):
            recompute.recompute_bytes(4, (1,))
        store[key] = right
    monkeypatch.setattr(recompute, "measured", lambda *_: [("forward", 0, 2**20)])
    with pytest.raises(EvidenceError, match="saves too little"):
        recompute.recompute_memory(1)
