"""Real steps on the lc5 pages are what ran."""

import base64
import json
import re

import pytest

from xtrain_docs.lectures.lc5 import real_and_simulated as real

REAL = "xtrain.schedules.chrome_trace:timeline_of"
TRACE = "xtrain.schedules.chrome_trace:chrome_trace"


def ran(world, name):
    return world(2).run(real.sleeping_step_by_the_clock, name, 4, 0.0)


def spans_by_part(timeline):
    """When each F, B (also of a whole backward) and W of a stage began and ended."""
    spans = {}
    for rank, actions in enumerate(timeline.schedule.actions):
        times = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, span in zip(actions, times, strict=True):
            for part in action.parts:
                kind = "B" if part.kind == "BW" else part.kind
                spans[kind, part.stage, part.micro_batch] = span
    return spans


@pytest.mark.verifies(REAL)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v", "dualpipe"])
def test_a_real_step_is_drawn_with_every_action_in_order(world, name):
    rows = ran(world, name)
    timeline = real.real_timeline(name, 4, rows)
    assert min(starts[0] for starts in timeline.starts) >= 0
    with_messages = real.real_timeline(name, 4, rows, messages=True)
    assert [list(map(str, a)) for a in with_messages.schedule.actions] == [
        [text for text, *_ in row] for row in rows
    ]
    spans = spans_by_part(timeline)
    for (kind, stage, i), (_, end) in spans.items():
        needed = {"F": ("F", stage - 1, i), "B": ("B", stage + 1, i)}.get(kind)
        assert needed not in spans or end >= spans[needed][1]
    rows[1] = [row for row in rows[1] if "F1" not in row[0]]
    with pytest.raises(ValueError, match="rank 1 did not run the actions"):
        real.real_timeline(name, 4, rows)


@pytest.mark.verifies(TRACE)
def test_both_timelines_can_be_downloaded_as_one_trace(world, monkeypatch):
    monkeypatch.setattr(real.runs, "remembered", lambda *_: ran(world, "one_f_one_b"))
    drawn = real.real_and_simulated("one_f_one_b", 2, 4, 10.0)
    assert drawn.count("<svg") == 2
    assert "1F1B, simulated: 150 ms" in drawn
    packed = re.search(r'href="data:application/json;base64,([^"]*)"', drawn)[1]
    events = json.loads(base64.b64decode(packed))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["real", "simulated"]
    slices = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert {"0F0", "1BW3", "1RECV_F0", "0REDUCE"} <= slices
    last = max(e["ts"] + e["dur"] for e in events if e.get("pid") and e["ph"] == "X")
    assert last == pytest.approx(150e3)


def test_simulated_times_of_sleeping_steps_are_of_whole_parts():
    assert real.simulated_seconds("gpipe", 4) == pytest.approx((8 + 3) * 0.15)
    assert real.simulated_seconds("interleaved", 4) == pytest.approx((8 + 1.5) * 0.15)
    assert real.simulated_seconds("one_f_one_b", 8) == pytest.approx((16 + 7) * 0.15)


def test_a_step_that_took_too_long_is_called_missed(monkeypatch):
    def took(ranks, name):
        return real.simulated_seconds(name, ranks) * (1.2 if name == "zb_h1" else 1.04)

    monkeypatch.setattr(real, "sleeping_seconds", took)
    verdicts = {row[0]: row[-1] for row in real.sleeping_steps(4).rows}
    assert {name for name, verdict in verdicts.items() if verdict} == {"ZB-H1"}
