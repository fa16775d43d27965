"""Timelines and the table of the page on overlap, checked before they are drawn."""

from ... import runs
from ...downloads import trace_link
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import percent, seconds
from .overlap_chart import Found, chart
from .overlap_trace import chrome_events

MILLISECONDS = 10.0
"""Of a forward chunk, and of a message of rows."""
LAYERS, MICRO_BATCHES, STEP_MS = 2, 8, 4.0


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
    return drawing + trace_link(chrome_events(found), "overlapped_block.json")


@FIGURES
def prefill_turns() -> str:
    """Two micro-batches of a prefill, one by one and in turns."""
    found = prefill_runs()
    words = "In turns, one micro-batch computes while the other one's rows travel."
    drawing = chart(found, f"Two micro-batches through {LAYERS} blocks", words)
    return drawing + trace_link(chrome_events(found), "prefill.json")


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
    from .runs_dualpipe import dualpipe_by_the_clock

    times = MICRO_BATCHES, STEP_MS, STEP_MS
    found = runs.remembered(dualpipe_by_the_clock, 4, bool(together), *times)
    if any(bool(run["pairs"]) != bool(together) for run in found):
        raise EvidenceError(f"pairs of layers: {[run['pairs'] for run in found]}")
    return max(found, key=lambda run: run["exposed"])
