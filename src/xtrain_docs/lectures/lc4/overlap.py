"""The page on overlap: matmuls and messages of one layer by the clock, and rounding.

A span is [what, begin, end] in seconds: a "matmul", a "message" from being issued to
being complete, or a "wait" for it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.comm import ring_pass
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.p2p import post_all
from xtrain.comm.work import Work
from xtrain.tensor_parallel import functions

from ... import runs
from ...figures import REGISTRY
from ...svg import TimeAxis, document, rect, text
from ...values import value

Span = list[Any]
TOKENS, FEATURES = 512, 1024
TIMES = 8  # of which the first warms the connections
WIDTH, LEFT, HIGH = 400, 84, 58
# its words, its offset in its row, its height, colour and opacity
LANES: dict[str, tuple[str, int, int, int, float]] = {
    "matmul": ("matmul", 0, 20, 2, 0.4),
    "message": ("message under way", 24, 8, 0, 1.0),
    "wait": ("rank waits", 36, 8, 1, 1.0),
}


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
        span = ["message", *2 * [time.perf_counter() - self.zero]]
        self.spans.append(span)

        def complete() -> None:
            for work in works:
                work.wait()
            span[2] = time.perf_counter() - self.zero

        watcher = Thread(target=complete)
        watcher.start()
        return Work(finish=lambda: self.timed("wait", watcher.join))


def fastest(prepare: Callable[[], Callable[[Clock], Any]]) -> list[Span]:
    """The spans of the run that took the least time, in the order of their begin."""
    found = []
    for _ in range(TIMES):
        run = prepare()
        dist.barrier()
        with Clock() as clock:
            run(clock)
        found.append(sorted(clock.spans, key=lambda span: span[1]))
    return min(found[1:], key=lambda spans: max(end for *_, end in spans))


def column_backward_by_the_clock(
    overlap: bool, tokens: int, features: int
) -> list[Span]:
    """Backward of a column layer: dX, its all-reduce, dW."""
    rows = features // dist.get_world_size()

    def prepare() -> Callable[[Clock], Any]:
        x = torch.ones(tokens, features, requires_grad=True)
        weight = torch.ones(rows, features, requires_grad=True)
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
    size, gather = dist.get_world_size(), functions.gather
    x, weight = (torch.ones(n // size, features) for n in (tokens, features))

    def forward(clock: Clock) -> None:
        def timed_gather(*arguments: Any) -> Tensor:
            whole = clock.timed("message", lambda: gather(*arguments))
            clock.spans.append(["wait", *clock.spans[-1][1:]])
            return whole

        functions.gather = timed_gather
        ring_pass.post_all = lambda *messages: [clock.watch(post_all(*messages))]
        functions.column_linear(x, [weight], 0, overlap)

    try:
        return fastest(lambda: forward)
    finally:
        functions.gather, ring_pass.post_all = gather, post_all


@REGISTRY
def dx_under_dw() -> str:
    """A column layer's backward by rank 0's clock, without and with overlap."""
    words = (
        "Without overlap the rank waits for the sum of dX before it computes dW; with "
        "overlap dW is computed while the sum travels."
    )
    rows = timed(column_backward_by_the_clock, 2, False, True)
    return chart(rows, ["dX", "dW"], "Backward of a column layer", words)


@REGISTRY
def gather_in_pieces() -> str:
    """A sequence-parallel column layer's forward by rank 0's clock: both forms."""
    words = (
        "The plain form waits for the whole all-gather and then multiplies once. The "
        "ring multiplies 4 pieces, and each but the last while the next arrives."
    )
    rows = timed(column_forward_by_the_clock, 4, True, "ring")
    return chart(rows, ["0", "3", "2", "1"], "Forward of a column layer", words)


def timed(run: Any, ranks: int, *overlaps: bool | str) -> dict[str, list[Span]]:
    """Rank 0's spans for each way to overlap."""
    return {
        str(how): runs.remembered(run, ranks, how, TOKENS, FEATURES)[0]
        for how in overlaps
    }


def chart(
    rows: dict[str, list[Span]], names: Sequence[str], title: str, words: str
) -> str:
    """A row for each form, over the same time; `names` are written into matmuls."""
    axis = TimeAxis(max(end for spans in rows.values() for *_, end in spans), LEFT)
    parts, x = [], 6
    for key, _, _, colour, opacity in LANES.values():
        parts.append(rect(x, 6, 18, 9, colour, opacity=opacity, radius=2, hover=key))
        parts.append(text(x + 24, 15, key, "xt-tick"))
        x += 44 + 7 * len(key)
    for row, (form, spans) in enumerate(rows.items()):
        top = 36 + row * HIGH
        parts.append(text(6, top + 14, "overlap", "xt-tick"))
        parts.append(text(6, top + 30, f"= {form}", "xt-tick"))
        for what, begin, end in spans:
            said, low, high, colour, opacity = LANES[what]
            parts.append(axis.bar(said, begin, end, top + low, high, colour, opacity))
        matmuls = [span for span in spans if span[0] == "matmul"]
        for (_, begin, end), name in zip(matmuls, names, strict=False):
            wide = axis.at(end) - axis.at(begin) > 8 * len(name)
            if wide and len(matmuls) == len(names):
                middle = axis.at((begin + end) / 2)
                parts.append(text(middle, top + 14, name, "xt-label", "middle"))
    bottom = 36 + HIGH * len(rows)
    parts += [axis.base(bottom), *axis.ends(bottom + 15)]
    return document(WIDTH, bottom + 22, parts, title, words)


@value
def rounding_of_sums(ranks: int, inner: int = 8192, each_hop: bool = True) -> float:
    """Relative error (RMS) of a product whose inner dim is cut and summed in bf16.

    Args:
        each_hop: the sum is rounded on every rank it passes; else once, at the end.
    """
    draw = torch.Generator().manual_seed(0)
    x_TI = torch.randn(64, inner, generator=draw).bfloat16().double()
    w_IO = torch.randn(inner, 64, generator=draw).bfloat16().double()
    pairs = zip(x_TI.chunk(ranks, 1), w_IO.chunk(ranks, 0), strict=True)
    total = torch.zeros(64, 64, dtype=torch.float64)
    for x, w in pairs:
        total += (x @ w).bfloat16().double()
        if each_hop:
            total = total.bfloat16().double()
    exact = x_TI @ w_IO
    error = total.bfloat16().double() - exact
    return float(error.square().mean().sqrt() / exact.square().mean().sqrt())
