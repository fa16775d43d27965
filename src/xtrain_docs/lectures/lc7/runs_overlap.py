"""Runs behind the page on overlap: a block's chunks and messages by the clock.

What computes sleeps, and so does the network, so that what is seen does not depend on
how busy a machine is; all that is routed and sent is real. Times are in seconds, from
the beginning of the run.

An event is [batch, chunk, kind, begin, end], a message [batch, chunk, begin, end] from
its issue to when it is there.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.bench.sleeping import SleepingLayer
from xtrain.bench.slow_network import SlowNetwork, slow_network
from xtrain.expert_parallel import GShardMoE, OverlappedMoEBlock, overlapped_prefill
from xtrain.expert_parallel.events import Event, exposed_seconds
from xtrain.expert_parallel.overlap_backward import BackwardChunks
from xtrain.expert_parallel.overlap_chunks import ForwardChunks

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 8, 8, 2, 32
TIMES = 4  # of which the first is not counted
Found = dict[str, Any]


class SleepingExperts(nn.Module):
    """Experts that take `seconds` forward and twice that backward."""

    def __init__(self, experts: nn.Module, hidden_size: int, seconds: float):
        super().__init__()
        self.hidden_size = hidden_size
        self.experts, self.sleep = experts, SleepingLayer(hidden_size, seconds)

    def forward(self, x_NH: Tensor, counts_E: Tensor) -> Tensor:
        return self.experts(self.sleep(x_NH), counts_E)


def network(
    milliseconds: float,
    ranks: list[int] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> SlowNetwork:
    """One on which rows under uniform routing take so long, and counts a tenth."""
    rows = TOKENS * TOP_K * HIDDEN * 4 // 2
    latency = milliseconds / 1e4
    return slow_network(latency, rows / (9 * latency), ranks, sleep)


def sleeping_block(seconds: float, group: SlowNetwork) -> OverlappedMoEBlock:
    """Attention and experts sleep so long forward and twice that backward."""
    torch.manual_seed(0)
    moe = GShardMoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group)
    moe.experts = SleepingExperts(moe.experts, HIDDEN, seconds)  # type: ignore
    return OverlappedMoEBlock(SleepingLayer(HIDDEN, seconds), moe)


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(1, TOKENS, HIDDEN, generator=generator, requires_grad=True)


def fastest(
    group: SlowNetwork,
    events: list[Event],
    prepare: Callable[[], Callable[[], Any]],
    tell: Callable[[SlowNetwork, list[Event]], Found] | None = None,
) -> Found:
    """Of a few runs, the one that took all ranks the least time."""
    found, spans = [], []
    for _ in range(TIMES):
        run = prepare()
        dist.barrier()
        events.clear()
        group.calls.clear()
        run()
        found.append((tell or told)(group, events))
        longest = torch.tensor(found[-1]["total"])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        spans.append(float(longest))
    return found[1 + spans[1:].index(min(spans[1:]))]


def told(group: SlowNetwork, events: list[Event]) -> Found:
    """What happened, as numbers and words alone."""
    zero = events[0].begin
    issues = [event for event in events if event.kind == "issue"]
    messages = [
        [event.batch, event.chunk, issued - zero, there - zero]
        for event, (issued, there) in zip(issues, group.calls, strict=True)
    ]
    return {
        "events": [[*e[:3], e.begin - zero, e.end - zero] for e in events],
        "messages": messages,
        "total": max(event.end for event in events) - zero,
        "exposed": exposed_seconds(events),
    }


def block_by_the_clock(together: bool, compute_ms: float, network_ms: float) -> Found:
    """The forward of one micro-batch and the backward of another, as a pair or not."""
    group = network(network_ms)
    block, grad = sleeping_block(compute_ms / 1e3, group), torch.ones(1, TOKENS, HIDDEN)
    events: list[Event] = []

    def prepare() -> Callable[[], Any]:
        other = ForwardChunks(block, batch(0))
        other.run()

        def run() -> None:
            block.events = events
            if together:
                block.run_with_backward(batch(1), other, grad)
            else:
                ForwardChunks(block, batch(1)).run()
                BackwardChunks(other, grad).run()
            block.events = None

        return run

    found = fastest(group, events, prepare)
    dist.destroy_process_group(group)
    return found


def prefill_by_the_clock(
    together: bool, layers: int, compute_ms: float, network_ms: float
) -> Found:
    """Two micro-batches through some layers, in turns or one after the other."""
    group, events = network(network_ms), list[Event]()
    blocks = [sleeping_block(compute_ms / 1e3, group) for _ in range(layers)]
    for block in blocks:
        block.events = events

    def run() -> None:
        if together:
            overlapped_prefill(blocks, batch(0), batch(1))
            return
        with torch.no_grad():
            for number in (0, 1):
                x = batch(number)
                for block in blocks:
                    x = ForwardChunks(block, x, batch=f"F{number}").run()

    found = fastest(group, events, lambda: run)
    dist.destroy_process_group(group)
    return found
