"""Real runs as timelines, and timelines as a trace that Perfetto opens.

timeline_of     what a runner did on each rank, and when: drawn as a simulated one
chrome_trace    several timelines in one file, for ui.perfetto.dev or Chrome's
                about:tracing: a timeline is a process, a rank a thread, an action
                a slice
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xtrain.schedules.action import COMPUTE, Action, Schedule
from xtrain.schedules.simulate import Timeline

Times = Sequence[tuple[float, float]]


def timeline_of(
    schedule: Schedule,
    executed: Sequence[Sequence[Action]],
    times: Sequence[Times],
    messages: bool = False,
) -> Timeline:
    """The actions of every rank with the times at which they began and ended.

    Args:
        schedule: that was run.
        executed: of each rank, as a `PipelineRunner` has it after a step.
        times: of these, likewise; the clocks of the ranks are one.
        messages: whether to keep sends, receives and reductions.

    Raises:
        ValueError: a rank did not run its schedule's actions in their order.
    """
    kept = [
        [(action, *at) for action, at in zip(*row, strict=True)
         if messages or action.kind in COMPUTE]
        for row in zip(executed, times, strict=True)
    ]  # fmt: skip
    for rank, row in enumerate(kept):
        computed = [action for action, *_ in row if action.kind in COMPUTE]
        if computed != list(schedule.actions[rank]):
            raise ValueError(f"rank {rank} did not run the actions of {schedule.name}")
    return Timeline(
        replace(schedule, actions=tuple([a for a, *_ in row] for row in kept)),
        tuple([begin for _, begin, _ in row] for row in kept),
        tuple([end for *_, end in row] for row in kept),
        tuple(
            sum(end - begin for action, begin, end in row if action.kind in COMPUTE)
            for row in kept
        ),
    )


def chrome_trace(timelines: Mapping[str, Timeline], seconds: float = 1.0) -> str:
    """JSON in the trace event format; every timeline begins at 0.

    Args:
        timelines: by the name of their process.
        seconds: how long a time of 1 is.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_name("process_name", process, 0, name))
        zero = min(starts[0] for starts in timeline.starts)
        micro = 1e6 * seconds
        for rank, actions in enumerate(timeline.schedule.actions):
            events.append(_name("thread_name", process, rank, f"rank {rank}"))
            rows = zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True)
            events += [
                {"ph": "X", "name": str(action), "cat": action.kind, "pid": process,
                 "tid": rank, "ts": round((begin - zero) * micro, 3),
                 "dur": round((end - begin) * micro, 3)}
                for action, begin, end in rows
            ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread,
            "args": {"name": name}}  # fmt: skip
