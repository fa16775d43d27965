"""Matmuls and messages of one layer as spans of time, and what they send.

A span is [what, begin, end] in seconds: a "matmul", a "message" from being issued to
being complete, or a "wait" for it. Every function runs on every rank.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.p2p import post_all
from xtrain.comm.work import Work
from xtrain.tensor_parallel import functions, ring_matmul

Span = list[Any]
TIMES = 8  # of which the first warms the connections


class Clock(TorchDispatchMode):
    """Writes down the matmuls of a block, and the messages handed to `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.zero = time.perf_counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not function.__name__.startswith(("mm", "addmm", "bmm")):
            return function(*args, **(kwargs or {}))
        return self.timed("matmul", lambda: function(*args, **(kwargs or {})))

    def timed(self, what: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter() - self.zero
        result = call()
        self.spans.append([what, begin, time.perf_counter() - self.zero])
        return result

    def watch(self, works: list[dist.Work]) -> Work:
        """The works as one, for which a thread waits: gloo's can be waited for once."""
        begin = time.perf_counter() - self.zero
        span = ["message", begin, begin]
        self.spans.append(span)

        def complete() -> None:
            for work in works:
                work.wait()
            span[2] = time.perf_counter() - self.zero

        watcher = Thread(target=complete)
        watcher.start()
        return Work(finish=lambda: self.timed("wait", watcher.join))

    def stop(self) -> list[Span]:
        """All spans in the order in which they began."""
        return sorted(self.spans, key=lambda span: span[1])


def fastest(prepare: Callable[[], Callable[[Clock], Any]]) -> list[Span]:
    """Of a few runs after the first, the one that took the least time."""
    found = []
    for _ in range(TIMES):
        run = prepare()
        dist.barrier()
        with Clock() as clock:
            run(clock)
        found.append(clock.stop())
    return min(found[1:], key=lambda spans: max(end for _, _, end in spans))


def column_backward_by_the_clock(
    overlap: bool, tokens: int, features: int
) -> list[Span]:
    """Backward of a column layer: dX, its all-reduce, dW."""
    size = dist.get_world_size()

    def prepare() -> Callable[[Clock], Any]:
        x = torch.ones(tokens, features, requires_grad=True)
        weight = torch.ones(features // size, features, requires_grad=True)
        (y,) = functions.column_linear(x, [weight], overlap=overlap)
        grad = torch.ones_like(y)

        def backward(clock: Clock) -> None:
            def all_reduce(total: Tensor, group: Any = None) -> Work:
                work = dist.all_reduce(total, group=group, async_op=True)
                return clock.watch([work])

            functions.TORCH = replace(TORCH, all_reduce=all_reduce)
            y.backward(grad)

        return backward

    try:
        return fastest(prepare)
    finally:
        functions.TORCH = TORCH


def column_forward_by_the_clock(
    overlap: bool | str, tokens: int, features: int
) -> list[Span]:
    """Forward of a sequence-parallel column layer, in pieces or not."""
    size = dist.get_world_size()
    gather = functions.gather

    def prepare() -> Callable[[Clock], Any]:
        x = torch.ones(tokens // size, features)
        weight = torch.ones(features // size, features)

        def forward(clock: Clock) -> None:
            def timed_gather(*arguments: Any) -> Tensor:
                whole = clock.timed("message", lambda: gather(*arguments))
                clock.spans.append(["wait", *clock.spans[-1][1:]])
                return whole

            functions.gather = timed_gather
            ring_matmul.post_all = lambda *messages: [clock.watch(post_all(*messages))]
            functions.column_linear(x, [weight], 0, overlap)

        return forward

    try:
        return fastest(prepare)
    finally:
        functions.gather, ring_matmul.post_all = gather, post_all


def sent_by_layers(overlap: bool | str, tokens: int, features: int) -> list[list[int]]:
    """[bytes, messages, matmuls] of column forward and backward, row forward and so."""
    size = dist.get_world_size()
    counted: list[list[int]] = []

    def count(call: Callable[[], Any]) -> Any:
        with Clock() as clock, CommLedger() as ledger:
            result = call()
        matmuls = sum(what == "matmul" for what, *_ in clock.spans)
        counted.append([ledger.bytes_sent, ledger.messages, matmuls])
        return result

    x = torch.ones(tokens // size, features, requires_grad=True)
    weight = torch.ones(features // size, features, requires_grad=True)
    (y,) = count(lambda: functions.column_linear(x, [weight], 0, overlap))
    count(y.sum().backward)
    x = torch.ones(tokens, features // size, requires_grad=True)
    weight = torch.ones(features, features // size, requires_grad=True)
    y = count(lambda: functions.row_linear(x, weight, 0, overlap))
    count(y.sum().backward)
    return counted
