"""Real steps on the lc5 pages are what ran, or stop the build."""

import base64
import json
import re

import pytest

from xtrain.schedules import SCHEDULES
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import real, runs_real

REAL = "xtrain.schedules.chrome_trace:timeline_of"
TRACE = "xtrain.schedules.chrome_trace:chrome_trace"


def ran(world, name, ranks=2, micro_batches=4):
    return world(ranks).run(
        runs_real.sleeping_step_by_the_clock, name, micro_batches, 0.0
    )


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
    late = [list(map(list, row)) for row in rows]
    first = next(row for row in late[0] if row[0] == "0F0")
    first[2] += 100.0  # ends after all that need it
    with pytest.raises(EvidenceError, match=r"is before \('F', 0, 0\)"):
        real.real_timeline(name, 4, late)
    late[1] = [row for row in late[1] if "F1" not in row[0]]
    with pytest.raises(ValueError, match="rank 1 did not run the actions"):
        real.real_timeline(name, 4, late)


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


def test_activations_that_are_not_the_simulated_ones_stop_the_build(world, monkeypatch):
    held = world(2).run(runs_real.activations_held, 4)
    monkeypatch.setattr(real.runs, "remembered", lambda *_: held)
    table = real.activations_measured(2, 4)
    assert len(table.rows) == len(SCHEDULES)
    held[1]["zb_v"] += 0.5
    with pytest.raises(EvidenceError, match="zb_v"):
        real.activations_measured(2, 4)


def test_the_shares_of_a_step_add_up(world, monkeypatch):
    arguments = ("one_f_one_b", 2, 2, 32, 8)
    rows = world(2).run(runs_real.decoder_step_by_the_clock, *arguments)
    monkeypatch.setattr(real.runs, "remembered", lambda *_: rows)
    for row in real.time_of_a_step("one_f_one_b", 2, *arguments[1:]).rows:
        shares = [float(cell.removesuffix("%")) for cell in row[2:]]
        assert sum(shares) == pytest.approx(100, abs=0.5)
        assert shares[0] > 0


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
