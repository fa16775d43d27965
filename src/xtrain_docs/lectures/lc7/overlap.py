"""Overlap: a block's chunks and messages by the clock, one by one and overlapped.

What computes sleeps, and so does the network, so that what is seen does not depend on
how busy a machine is; all that is routed and sent is real. Times are in seconds, from
the beginning of the run.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.bench.sleeping import SleepingLayer
from xtrain.bench.slow_network import SlowNetwork, slow_network
from xtrain.expert_parallel import GShardMoE, OverlappedMoEBlock, overlapped_prefill
from xtrain.expert_parallel.events import ChunkEvent, exposed_seconds
from xtrain.expert_parallel.overlap_backward import BackwardChunks
from xtrain.expert_parallel.overlap_chunks import ForwardChunks

from ... import runs
from ...downloads import trace_link
from ...figures import REGISTRY
from ...svg import TimeAxis, document, rect, text
from ...values import value

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 8, 8, 2, 32
BLOCKS = 2
CHUNK = 10e-3  # seconds of a forward chunk, and of a message of rows
TIMES = 4  # of which the first is not counted
Found = dict[str, Any]

# ---------------------------------------------------------------------------- runs


class SleepingExperts(nn.Module):
    """Experts that take a while forward and twice that backward."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.hidden_size = HIDDEN
        self.experts, self.sleep = experts, SleepingLayer(HIDDEN, CHUNK)

    def forward(self, x_NH: Tensor, counts_E: Tensor) -> Tensor:
        return self.experts(self.sleep(x_NH), counts_E)


def sleeping_block(group: SlowNetwork) -> OverlappedMoEBlock:
    torch.manual_seed(0)
    moe = GShardMoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group)
    moe.experts = SleepingExperts(moe.experts)  # type: ignore
    return OverlappedMoEBlock(SleepingLayer(HIDDEN, CHUNK), moe)


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(1, TOKENS, HIDDEN, generator=generator, requires_grad=True)


def pair(blocks: Sequence[OverlappedMoEBlock], together: bool) -> Callable[[], object]:
    """The forward of one micro-batch and the backward of another."""
    block, grad = blocks[0], torch.ones(1, TOKENS, HIDDEN)
    other = ForwardChunks(block, batch(0))
    other.run()
    if together:
        return lambda: block.run_with_backward(batch(1), other, grad)
    return lambda: (
        ForwardChunks(block, batch(1)).run(), BackwardChunks(other, grad).run()
    )  # fmt: skip


def prefill(blocks: Sequence[OverlappedMoEBlock], together: bool) -> Callable[[], None]:
    """The forwards of two micro-batches."""

    def run() -> None:
        if together:
            overlapped_prefill(blocks, batch(0), batch(1))
            return
        with torch.no_grad():
            for number in (0, 1):
                x = batch(number)
                for block in blocks:
                    x = ForwardChunks(block, x, batch=f"F{number}").run()

    return run


def by_the_clock(kind: str, together: bool) -> Found:
    """Of a few runs, the one that took all ranks the least time.

    Rows under uniform routing travel as long as a chunk computes, counts a tenth.
    """
    group = slow_network(CHUNK / 10, TOKENS * TOP_K * HIDDEN * 4 / 2 / (0.9 * CHUNK))
    blocks = [sleeping_block(group) for _ in range(BLOCKS)]
    found, spans = [], []
    for _ in range(TIMES):
        run = (pair if kind == "pair" else prefill)(blocks, together)
        dist.barrier()
        group.calls.clear()
        events: list[ChunkEvent] = []
        for block in blocks:
            block.events = events
        run()
        for block in blocks:
            block.events = None
        found.append(told(group, events))
        longest = torch.tensor(found[-1]["total"])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        spans.append(float(longest))
    dist.destroy_process_group(group)
    return found[1 + spans[1:].index(min(spans[1:]))]


def told(group: SlowNetwork, events: list[ChunkEvent]) -> Found:
    """[batch, chunk, kind, begin, end] of each event; messages last until they came."""
    zero = events[0].begin
    calls = iter(group.calls)
    timed = [
        (*e[:3], *(next(calls) if e.kind == "issue" else (e.begin, e.end)))
        for e in events
    ]
    return {
        "events": [[*names, a - zero, b - zero] for *names, a, b in timed],
        "total": max(event.end for event in events) - zero,
        "exposed": exposed_seconds(events),
    }


def recorded(kind: str, together: bool) -> Found:
    return runs.remembered(by_the_clock, 2, kind, together)[0]


@value
def clock(kind: str, together: bool, what: str = "total") -> float:
    """Seconds of a "pair" or a "prefill" in all, or those "exposed" to messages."""
    return recorded(kind, bool(together))[what]


# ------------------------------------------------------------------------- drawings

WIDTH, LEFT, HIGH, TOP = 400, 78, 88, 62
LETTERS = {"attention": "A", "dispatch": "D", "mlp": "M", "combine": "C"}
NARROWEST = 11.0  # that a letter fits
KEY = "A attention · D dispatch · M experts (MLP) · C combine"
BATCHES = {
    "F": (2, "forward of one micro-batch"),
    "B": (1, "backward of another"),
    "F0": (2, "micro-batch 0"),
    "F1": (3, "micro-batch 1"),
}
LANES = {"compute": "computes", "issue": "network", "wait": "waits"}


@REGISTRY
def overlapped_block() -> str:
    """A block's forward and another's backward, one by one and as a pair."""
    return timeline("pair", "overlapped", "A forward and a backward of a block")


@REGISTRY
def prefill_turns() -> str:
    """Two micro-batches of a prefill, one by one and in turns."""
    title = f"Two micro-batches through {BLOCKS} blocks"
    return timeline("prefill", "in turns", title)


def timeline(kind: str, name: str, title: str) -> str:
    """The runs one below the other, over the same time."""
    found = {"one by one": recorded(kind, False), name: recorded(kind, True)}
    axis = TimeAxis(max(run["total"] for run in found.values()), LEFT, WIDTH)
    batches = dict.fromkeys(e[0] for run in found.values() for e in run["events"])
    parts = [text(6, 33, KEY, "xt-tick")]
    for at, (colour, said) in enumerate(map(BATCHES.__getitem__, batches)):
        parts.append(rect(6 + 196 * at, 6, 18, 9, colour, opacity=0.4, radius=2))
        parts.append(text(28 + 196 * at, 15, said, "xt-tick"))
    for number, (name, run) in enumerate(found.items()):
        top = TOP + number * HIGH
        parts.append(text(6, top, name, "xt-label"))
        for lane, what in enumerate(LANES.values()):
            parts.append(text(12, top + 16 + 20 * lane, what, "xt-tick"))
        parts += boxes(run, top, axis)
    bottom = TOP + HIGH * len(found) - 14
    parts += [axis.base(bottom), *axis.ends(bottom + 15)]
    words = "Overlapped, each message is under way while another micro-batch computes."
    drawing = document(WIDTH, bottom + 22, parts, title, words)
    return drawing + trace_link(chrome_events(found), f"{kind}.json")


def boxes(run: Found, top: float, axis: TimeAxis) -> Iterator[str]:
    """The boxes of one run, with letters where they fit."""
    for batch, chunk, kind, begin, end in run["events"]:
        lane = list(LANES).index(kind)
        waits = kind == "wait"
        end = min(end, axis.last)
        y = top + 4 + 20 * lane
        colour, opacity = (0, 1.0) if waits else (BATCHES[batch][0], 0.4)
        said = f"{batch} {chunk}"
        yield axis.bar(said, begin, end, y, 16, colour, opacity, least=1.0)
        at, wide = axis.at(begin), axis.at(end) - axis.at(begin)
        if not waits and chunk in LETTERS and wide > NARROWEST:
            yield text(at + wide / 2, y + 12, LETTERS[chunk], "xt-label", "middle")


def chrome_events(found: dict[str, Found]) -> str:
    """In the trace event format: a run is a process, a lane a thread."""
    events: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(found.items()):
        named = partial(dict, ph="M", pid=process)
        events.append(named(name="process_name", args={"name": name}))
        for lane, words in enumerate(LANES.values()):
            events.append(named(name="thread_name", tid=lane, args={"name": words}))
        for batch, chunk, kind, begin, end in run["events"]:
            events.append({
                "ph": "X", "name": f"{batch} {chunk}", "cat": chunk, "pid": process,
                "tid": list(LANES).index(kind), "ts": round(begin * 1e6, 3),
                "dur": round((end - begin) * 1e6, 3),
            })  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
