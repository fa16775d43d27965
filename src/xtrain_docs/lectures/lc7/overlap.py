"""Timelines, a trace and tables of the page on overlap."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from ... import runs, values
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import percent, seconds

Found = dict[str, Any]
WIDTH, LEFT, HIGH, TOP = 400, 78, 88, 62
MILLISECONDS = 10.0
"""Of a forward chunk, and of a message of rows."""
LAYERS, MICRO_BATCHES, STEP_MS = 2, 8, 4.0
LETTERS = {"attention": "A", "dispatch": "D", "mlp": "M", "combine": "C"}
"""What stands in a box: one letter, so that it fits the shortest of them."""
NARROWEST = 11.0
"""Units of width that a letter needs."""
KEY = "A attention · D dispatch · M experts (MLP) · C combine"
FAINT = 0.4
"""Opacity of what carries a letter."""
COLOURS = {"F": 2, "B": 1, "F0": 2, "F1": 3}
WORDS = {
    "F": "forward of one micro-batch",
    "B": "backward of another",
    "F0": "micro-batch 0",
    "F1": "micro-batch 1",
}


def pair_runs() -> dict[str, Found]:
    """Forward and backward by rank 0's clock: alone, and as a pair."""
    from .runs_overlap import block_by_the_clock

    found = {
        name: runs.remembered(block_by_the_clock, 2, together, *(MILLISECONDS,) * 2)[0]
        for name, together in (("one by one", False), ("overlapped", True))
    }
    check_overlap(found["one by one"], found["overlapped"], hidden=4, count=4)
    return found


def prefill_runs() -> dict[str, Found]:
    """Two micro-batches of a prefill by rank 0's clock: alone, and in turns."""
    from .runs_overlap import prefill_by_the_clock

    times = MILLISECONDS, MILLISECONDS
    found = {
        name: runs.remembered(prefill_by_the_clock, 2, together, LAYERS, *times)[0]
        for name, together in (("one by one", False), ("in turns", True))
    }
    count = 4 * LAYERS
    check_overlap(found["one by one"], found["in turns"], hidden=count - 1, count=count)
    return found


def compute_under(found: Found) -> list[bool]:
    """For each message of rows, whether a chunk ran between its issue and its wait."""
    under = []
    for at, (batch, chunk, kind, *_) in enumerate(found["events"]):
        if kind == "issue" and chunk != "counts":
            rest = found["events"][at + 1 :]
            names = [tuple(event[:3]) for event in rest]
            between = rest[: names.index((batch, chunk, "wait"))]
            under.append(any(e[2] == "compute" for e in between))
    return under


def check_overlap(alone: Found, together: Found, hidden: int, count: int) -> None:
    """EvidenceError unless messages lie under compute in the second alone."""
    seen = compute_under(alone), compute_under(together)
    if [len(s) for s in seen] != [count, count] or any(seen[0]):
        raise EvidenceError(f"messages that lie under compute: {seen}")
    if sum(seen[1]) != hidden:
        raise EvidenceError(f"{sum(seen[1])} messages lie under compute, not {hidden}")


@FIGURES
def overlapped_block() -> str:
    """A block's forward and another's backward, one by one and as a pair."""
    found = pair_runs()
    words = (
        "One by one, the rank waits for each message. As a pair, each message is under "
        "way while a chunk of the other micro-batch computes."
    )
    drawing = chart(found, "A forward and a backward of a block", words)
    return drawing + download(found, "overlapped_block.json")


@FIGURES
def prefill_turns() -> str:
    """Two micro-batches of a prefill, one by one and in turns."""
    found = prefill_runs()
    words = "In turns, one micro-batch computes while the other one's rows travel."
    drawing = chart(found, f"Two micro-batches through {LAYERS} blocks", words)
    return drawing + download(found, "prefill.json")


@TABLES
def exposed_communication() -> Table:
    """Time of each run, and how long a rank waited for messages."""
    rows = []
    for what, found in (
        ("a forward and a backward of a block", pair_runs()),
        (f"prefill of two micro-batches, {LAYERS} blocks", prefill_runs()),
    ):
        first = next(iter(found.values()))
        for name, run in found.items():
            rows.append(row(what, name, run, first))
    steps = {
        name: step_runs(together)
        for name, together in (("one by one", 0), ("pairs", 1))
    }
    for name, run in steps.items():
        rows.append(row("a step of DualPipe", name, run, steps["one by one"]))
    header = ["", "", "time", "waits for experts' messages", "share", "times as fast"]
    return Table(header, rows, "llrrrr")


def row(what: str, name: str, run: Found, first: Found) -> list[str]:
    ratio = f"{first['total'] / run['total']:.2f}x"
    waits = run["exposed"]
    share = percent(waits / run["total"], 0)
    return [what, name, seconds(run["total"]), seconds(waits), share, ratio]


def step_runs(together: int) -> Found:
    """A step of DualPipe: the rank that waited the longest."""
    from .runs_overlap import dualpipe_by_the_clock

    times = MICRO_BATCHES, STEP_MS, STEP_MS
    found = runs.remembered(dualpipe_by_the_clock, 4, bool(together), *times)
    if any(bool(run["pairs"]) != bool(together) for run in found):
        raise EvidenceError(f"pairs of layers: {[run['pairs'] for run in found]}")
    return max(found, key=lambda run: run["exposed"])


# ----------------------------------------------------------------------- the drawing


def chart(rows: Mapping[str, Found], title: str, words: str) -> str:
    """For each run a lane of compute, one of messages and one of waits."""
    last = max(run["total"] for run in rows.values())
    batches = dict.fromkeys(e[0] for run in rows.values() for e in run["events"])
    parts: list[str] = []
    for at, batch in enumerate(batches):
        parts.append(box(6 + 196 * at, 6, 18, 9, COLOURS[batch], FAINT, WORDS[batch]))
        parts.append(text(28 + 196 * at, 15, WORDS[batch], "xt-tick"))
    parts.append(text(6, 33, KEY, "xt-tick"))
    for number, (name, run) in enumerate(rows.items()):
        top = TOP + number * HIGH
        parts.append(text(6, top, name, "xt-label"))
        for lane, what in enumerate(("computes", "network", "waits")):
            parts.append(text(12, top + 16 + 20 * lane, what, "xt-tick"))
        parts += lanes(run, top, last)
    bottom = TOP + HIGH * len(rows) - 14
    parts.append(line(LEFT, bottom, WIDTH - 6, bottom, "xt-axis"))
    parts.append(text(LEFT, bottom + 15, "0 ms", "xt-tick"))
    parts.append(text(WIDTH - 6, bottom + 15, values.seconds(last), "xt-tick", "end"))
    return fit(document(WIDTH, bottom + 22, parts, title, words), WIDTH)


def lanes(run: Found, top: float, last: float) -> list[str]:
    """The boxes of one run."""
    parts = []

    def add(lane: int, batch: str, what: str, begin: float, end: float) -> None:
        at, wide = px(begin, last), px(end, last) - px(begin, last)
        hover = f"{batch} {what}: {values.seconds(begin)} to {values.seconds(end)}"
        colour = 0 if lane == 2 else COLOURS[batch]
        y = top + 4 + 20 * lane
        parts.append(box(at, y, wide, 16, colour, 1 if lane == 2 else FAINT, hover))
        letter = LETTERS.get(what, "")
        if letter and lane < 2 and wide > NARROWEST:
            parts.append(text(at + wide / 2, y + 12, letter, "xt-label", "middle"))

    for batch, chunk, kind, begin, end in run["events"]:
        if kind == "compute":
            add(0, batch, chunk, begin, end)
        elif kind == "wait":
            add(2, batch, chunk, begin, end)
    for batch, chunk, begin, end in run["messages"]:
        add(1, batch, chunk, begin, min(end, last))
    return parts


def px(at: float, last: float) -> float:
    """Where a time lies."""
    return LEFT + (WIDTH - LEFT - 6) * at / last


def box(
    x: float, y: float, wide: float, high: float, colour: int, fill: float, hover: str
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide, 1.0):.1f}" height="{high}" '
        f'rx="2" class="xt-bar-fill xt-s{colour}" fill-opacity="{fill}">'
        f"<title>{hover}</title></rect>"
    )


def chrome_events(rows: Mapping[str, Found]) -> str:
    """The runs in the trace event format: a run is a process, a lane a thread."""
    events: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(rows.items()):
        events.append(named("process_name", process, 0, name))
        for lane, words in enumerate(("computes", "network", "waits")):
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


def download(rows: Mapping[str, Found], name: str) -> str:
    """A link that needs no server."""
    coded = base64.b64encode(chrome_events(rows).encode()).decode()
    return (
        f'<p><a class="xt-download" download="{name}" '
        f'href="data:application/json;base64,{coded}">Download both as a trace</a></p>'
    )
