"""Timelines as trace events, and what was run as a timeline."""

import json

import pytest

from xtrain.schedules import (
    SCHEDULES,
    Action,
    render_svg,
    simulate,
    with_messages,
    with_reductions,
)
from xtrain.schedules.chrome_trace import chrome_trace, timeline_of

TRACE = "xtrain.schedules.chrome_trace:chrome_trace"
MEASURED = "xtrain.schedules.chrome_trace:timeline_of"


def as_if_run(timeline):
    """What runners would have after a step with these times; messages take none."""
    executed = with_messages(with_reductions(timeline.schedule)).actions
    times = []
    for rank, actions in enumerate(executed):
        spans = iter(zip(timeline.starts[rank], timeline.ends[rank], strict=True))
        now, row = 0.0, []
        for action in actions:
            computes = action.kind in ("F", "B", "W", "BW")
            row.append(next(spans) if computes else (now, now))
            now = row[-1][1]
        times.append(row)
    return executed, times


@pytest.mark.verifies(MEASURED)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_with_simulated_times_is_the_simulated_timeline(name):
    timeline = simulate(SCHEDULES[name](4, 8), 1.0, 1.5, 0.5, p2p=0.25)
    found = timeline_of(timeline.schedule, *as_if_run(timeline))
    assert found.makespan == timeline.makespan
    assert found.works == timeline.works
    assert found.idle == pytest.approx(timeline.idle)
    assert found.peak_activations == timeline.peak_activations
    assert render_svg(found) == render_svg(timeline)


@pytest.mark.verifies(MEASURED)
def test_a_run_in_another_order_is_refused():
    timeline = simulate(SCHEDULES["gpipe"](2, 2))
    executed, times = as_if_run(timeline)
    swapped = [*executed[1]]
    first, second = (i for i, a in enumerate(swapped) if a.kind == "BW")
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ValueError, match="rank 1 did not run the actions of gpipe"):
        timeline_of(timeline.schedule, [executed[0], swapped], times)


@pytest.mark.verifies(TRACE, MEASURED)
def test_a_trace_has_a_process_for_each_timeline_and_a_slice_for_each_action():
    timeline = simulate(SCHEDULES["zb_h1"](2, 3), p2p=0.5)
    run = timeline_of(timeline.schedule, *as_if_run(timeline), messages=True)
    timelines = {"real": run, "simulated": timeline}
    events = json.loads(chrome_trace(timelines, seconds=0.02))["traceEvents"]
    names = {
        (e["pid"], e["tid"], e["name"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M"
    }
    assert names[0, 0, "process_name"] == "real"
    assert names[1, 1, "thread_name"] == "rank 1"
    for process, shown in enumerate(timelines.values()):
        for rank, actions in enumerate(shown.schedule.actions):
            slices = [
                e
                for e in events
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, rank)
            ]
            assert [e["name"] for e in slices] == list(map(str, actions))
            assert [e["ts"] for e in slices] == pytest.approx(
                [20_000 * start for start in shown.starts[rank]]
            )
            assert sum(e["dur"] for e in slices) == pytest.approx(20_000 * shown.work)
    sent = [e["name"] for e in events if e["cat" if "cat" in e else "ph"] == "SEND_F"]
    assert sent == [str(Action("SEND_F", 0, i)) for i in range(3)]
