"""Lecture 6: attention over a cut sequence, against one process and against torch.

    one process   F.scaled_dot_product_attention on one thread
    ours          ring, all-gather and Ulysses attention over all ranks
    torch's ring  the loop inside torch's `context_parallel`, called by hand: the
                  context manager has no rule for the attention kernel of the CPU

`size` is that of all queries in bytes; keys, values and the output have the same.
Blocks are raced in one process: they are what every rank computes between messages.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from xtrain.bench.attention_trials import (
    TOLERANCE,
    Attend,
    cut_trial,
    in_blocks,
    in_float64,
    naive,
    one_process_trial,
    sdpa,
    size_of,
)
from xtrain.bench.race import Contestant, Goal, Race
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from xtrain.context_parallel.block_attention import FUSED_CPU, TILES, BlockAttention

TITLE = "Lecture 6: attention over a cut sequence"

LONG, SHORT, BLOCKS = size_of(4096), size_of(512), size_of(2048)


# ------------------------------------------------------------------ over all ranks


class TorchRing(torch.autograd.Function):
    """torch's ring with the CPU's kernel; causal is balanced as zigzag, its default."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        theirs._cp_options.enable_load_balance = causal
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = theirs._templated_ring_attention(
            group, 2, kernel, q, k, v, is_causal=causal
        )
        ctx.group, ctx.causal = group, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        aten: Any = torch.ops.aten
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        loop: Any = theirs._templated_ring_attention_backward
        dq, dk, dv = loop(
            ctx.group, 2, kernel, grad_out, "grad_out", *ctx.saved_tensors, ctx.causal,
            dropout_p=0.0,
        )  # fmt: skip
        return None, None, dq, dk, dv


def torch_ring(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, group: ProcessGroup
) -> Tensor:
    """Keys and values are gathered once, and gradients rotate: torch's defaults."""
    return TorchRing.apply(group, causal, q, k, v)


def cut(attend: Attend, balance: str = "none", backend: str = "gloo") -> Callable:
    """Makes the trial of a sequence that is cut."""
    return partial(cut_trial, attend, balance, backend)


def attention_race(name: str, size: int, causal: bool, least: float | None) -> Race:
    """Every way to cut the sequence, against one process."""
    balance = "zigzag" if causal else "none"
    ring = partial(ring_attention, causal=causal, balance=balance)
    gathering = partial(all_gather_attention, causal=causal, balance=balance)
    contiguous = Contestant(
        "ring, contiguous", cut(partial(ring_attention, causal=causal))
    )
    return Race(
        name,
        f"Attention, {'causal' if causal else 'full'}",
        (
            Contestant(
                "one process", partial(one_process_trial, partial(sdpa, causal=causal))
            ),
            Contestant("ring", cut(ring, balance)),
            *([contiguous] if causal else []),
            Contestant("all-gather", cut(gathering, balance)),
            Contestant("Ulysses", cut(partial(ulysses_attention, causal=causal))),
            Contestant(
                "torch's ring", cut(partial(torch_ring, causal=causal), balance)
            ),
            Contestant("ring on xtrain-shm", cut(ring, balance, "xtrain-shm")),
            Contestant(
                "all-gather on xtrain-shm", cut(gathering, balance, "xtrain-shm")
            ),
        ),
        sizes=(size,),
        ranks=(2, 4) if causal else (2,),
        reference=partial(in_float64, causal),
        tolerance=TOLERANCE,
        goals=() if least is None else (Goal("ring", least, size, 2),),
    )


# ------------------------------------------------------------------- one block


def block_race(name: str, causal: bool, baseline: str, goals: dict[str, float]) -> Race:
    """One process: blocks by the kernel and by the tiles, and without blocks."""
    ways: dict[str, Attend] = {
        "all scores": naive,
        "tiles": partial(in_blocks, TILES),
        "fused blocks": partial(in_blocks, FUSED_CPU),
        "SDPA": sdpa,
    }
    sides = {
        who: Contestant(who, partial(one_process_trial, partial(way, causal=causal)))
        for who, way in ways.items()
    }
    return Race(
        name,
        f"Blocks in one process, {'causal' if causal else 'full'}",
        (sides.pop(baseline), *sides.values()),
        sizes=(BLOCKS,),
        ranks=(1,),
        reference=partial(in_float64, causal),
        tolerance=TOLERANCE,
        goals=tuple(Goal(who, least, BLOCKS, 1) for who, least in goals.items()),
    )


# ------------------------------------------------------------ blocks that sleep

PAIR = 50e-6
SLEEP = size_of(256)


def sleepy(compute: Callable[..., Any], queries: int, *tensors: Any) -> Any:
    """A block that also sleeps PAIR for each query and key that belong together.

    Args:
        queries: where the queries stand among the arguments; keys are next.
        tensors: those of `compute`; the last but one is whether it is causal.
    """
    rows, columns = (tensors[queries + i].shape[2] for i in range(2))
    pairs = rows * (rows + 1) // 2 if tensors[-2] else rows * columns
    time.sleep(PAIR * pairs)
    return compute(*tensors)


SLEEPING = BlockAttention(
    partial(sleepy, FUSED_CPU.forward, 0), partial(sleepy, FUSED_CPU.backward, 1)
)


def sleeping() -> Race:
    """How long a ring takes whose ranks never compete for a core, by balance."""
    ways = {"contiguous": "none", "striped": "striped", "zigzag": "zigzag"}
    sides = []
    for who, balance in ways.items():
        attend = partial(ring_attention, balance=balance, block_attention=SLEEPING)
        sides.append(Contestant(who, cut(attend, balance)))
    return Race(
        "sleeping",
        "Blocks that sleep",
        tuple(sides),
        sizes=(SLEEP,),
        ranks=(8,),
        reference=partial(in_float64, True),
        tolerance=TOLERANCE,
        goals=(Goal("zigzag", 1.6, SLEEP, 8),),
    )


RACES = [
    attention_race("causal_long", LONG, True, 1.6),
    attention_race("full_long", LONG, False, None),
    attention_race("causal_short", SHORT, True, None),
    block_race("tiles_full", False, "tiles", {"fused blocks": 1.6}),
    block_race("tiles_causal", True, "tiles", {"fused blocks": 1.8}),
    block_race("scores_full", False, "all scores", {"fused blocks": 1.9}),
    block_race("scores_causal", True, "all scores", {"fused blocks": 3.8}),
    sleeping(),
]
