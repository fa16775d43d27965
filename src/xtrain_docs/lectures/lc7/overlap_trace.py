"""The runs by the clock in the trace event format, for a trace viewer."""

import json
from collections.abc import Mapping
from typing import Any

from .overlap_chart import LANES, Found


def chrome_events(rows: Mapping[str, Found]) -> str:
    """The runs in the trace event format: a run is a process, a lane a thread."""
    events: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(rows.items()):
        events.append(named("process_name", process, 0, name))
        for lane, words in enumerate(LANES):
            events.append(named("thread_name", process, lane, words))
        for batch, chunk, kind, begin, end in run["events"]:
            if kind != "issue":
                lane = 0 if kind == "compute" else 2
                events.append(slice_of(f"{batch} {chunk}", process, lane, begin, end))
        for batch, chunk, begin, end in run["messages"]:
            events.append(slice_of(f"{batch} {chunk}", process, 1, begin, end))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def named(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane,
            "args": {"name": name}}  # fmt: skip


def slice_of(
    name: str, process: int, lane: int, begin: float, end: float
) -> dict[str, Any]:
    micro = 1e6
    return {"ph": "X", "name": name, "cat": name.split()[1], "pid": process,
            "tid": lane, "ts": round(begin * micro, 3),
            "dur": round((end - begin) * micro, 3)}  # fmt: skip
