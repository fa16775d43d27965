"""The timelines and the table of the page on overlap are of real runs."""

import copy
import json
import re

import pytest

from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import overlap, overlap_chart, overlap_trace


def test_messages_lie_under_compute_in_the_pair_alone(on_ranks):
    for found in (overlap.pair_runs(), overlap.prefill_runs()):
        alone, together = found.values()
        assert not any(overlap.compute_under(alone))
        assert sum(overlap.compute_under(together)) >= 4
        assert len(alone["messages"]) == len(together["messages"])
    drawing = overlap.overlapped_block()
    assert drawing.count("<title>F attention") == 2
    assert "Download both as a trace" in drawing
    assert "<title>F1 combine" in overlap.prefill_turns()


BOX = re.compile(
    r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"[^>]*'
    r'fill-opacity="0.4"><title>\S+ (\w+)'
)
LETTER = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([ADMC])</text>')


def test_each_long_box_has_its_letter_inside(on_ranks):
    for drawing in (overlap.overlapped_block(), overlap.prefill_turns()):
        letters = [
            (float(x), float(y), letter) for x, y, letter in LETTER.findall(drawing)
        ]
        long = [
            (float(x) + float(width) / 2, float(y), overlap_chart.LETTERS[what])
            for x, y, width, what in BOX.findall(drawing)
            if what in overlap_chart.LETTERS
            and float(width) > overlap_chart.NARROWEST + 0.1
        ]
        assert 0 < len(long) <= len(letters)
        for middle, top, letter in long:
            assert any(
                letter == found and abs(middle - x) < 0.15 and top < y < top + 17
                for x, y, found in letters
            )


def test_the_trace_has_every_chunk_and_message(on_ranks):
    found = overlap.pair_runs()
    events = json.loads(overlap_trace.chrome_events(found))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    for process, run in enumerate(found.values()):
        kinds = [kind for _, _, kind, *_ in run["events"]]
        computed = [s for s in slices if s["pid"] == process and s["tid"] == 0]
        assert len(computed) == kinds.count("compute")
        messages = [s for s in slices if s["pid"] == process and s["tid"] == 1]
        assert len(messages) == kinds.count("issue")


def test_runs_that_hide_nothing_stop_the_build(on_ranks):
    alone, together = overlap.pair_runs().values()
    overlap.check_overlap(alone, together, 4, 4)
    with pytest.raises(EvidenceError, match="lie under compute"):
        overlap.check_overlap(together, alone, 4, 4)
    broken = copy.deepcopy(together)
    names = [tuple(event[:3]) for event in broken["events"]]
    at = names.index(("B", "mlp", "compute"))
    broken["events"].insert(0, broken["events"].pop(at))
    with pytest.raises(EvidenceError, match="3 messages lie under compute"):
        overlap.check_overlap(alone, broken, 4, 4)


def test_the_table_is_of_runs_with_and_without_overlap(on_ranks, monkeypatch):
    rows = overlap.exposed_communication().rows
    assert [row[1] for row in rows] == [
        "one by one", "overlapped", "one by one", "in turns", "one by one", "pairs"
    ]  # fmt: skip
    monkeypatch.setattr(
        overlap.runs, "remembered", lambda *a: [{"pairs": 0, "exposed": 1}] * 4
    )
    with pytest.raises(EvidenceError, match="pairs of layers"):
        overlap.step_runs(1)
