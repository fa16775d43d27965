"""A recorded run as a trace that Perfetto and Chrome's about:tracing open.

a rank is a thread, a piece of its time a slice, a message an arrow from the slice
in which its bytes left to the one in which they had all arrived
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from xtrain.cluster.recorder import RunRecord, Span

MICRO, NANO = 1e6, 1e-3  # of a second; of a microsecond, the unit of the format


def chrome_trace(record: RunRecord, name: str = "virtual cluster") -> str:
    """JSON in the trace event format; times in virtual microseconds."""
    events: list[dict[str, Any]] = [named("process_name", 0, name)]
    tracks = []
    for rank in range(len(record.seconds)):
        events.append(named("thread_name", rank, f"rank {rank}"))
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank,
             "args": {"sort_index": rank}}
        )  # fmt: skip
        track = list(record.spans(rank))
        tracks.append(track)
        events += [slice_of(rank, span) for span in track]
    events += arrows(record, tracks)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def named(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": rank, "args": {"name": name}}


def micro(seconds: float) -> float:
    return round(seconds * MICRO, 3)


def slice_of(rank: int, span: Span) -> dict[str, Any]:
    event = {
        "ph": "X", "name": (span.call or span.kind).partition("(")[0],
        "cat": span.kind, "pid": 0, "tid": rank, "ts": micro(span.start),
        "dur": round(micro(span.end) - micro(span.start), 3),
    }  # fmt: skip
    if span.call:
        event["args"] = {"call": span.call}
    return event


def arrows(
    record: RunRecord, tracks: Sequence[Sequence[Span]]
) -> Iterator[dict[str, Any]]:
    """Two events for each message whose ends lie in slices that can be seen."""
    starts = [[micro(span.start) for span in track] for track in tracks]
    for number, one in enumerate(record.transfers):
        if one.kind != "message":
            continue
        source, target = one.ranks
        left, arrived = micro(one.start), micro(one.end) - NANO
        if arrived <= left or not (
            inside(starts[source], tracks[source], left)
            and inside(starts[target], tracks[target], arrived)
        ):
            continue
        common = {"name": "message", "cat": "message", "pid": 0, "id": number,
                  "args": {"bytes": one.nbytes}}  # fmt: skip
        yield {**common, "ph": "s", "tid": source, "ts": left}
        yield {**common, "ph": "f", "bp": "e", "tid": target, "ts": round(arrived, 3)}


def inside(starts: Sequence[float], track: Sequence[Span], time: float) -> bool:
    """Whether a rank has a slice at a time."""
    at = bisect_right(starts, time) - 1
    return at >= 0 and time < micro(track[at].end)
