"""How one block is computed: readable tiles, or a kernel that returns the log-sum-exp.

Merging blocks needs each one's log-sum-exp, and their backward needs to be given that
of all of them. `F.scaled_dot_product_attention` offers neither; the kernels below it
do. They are equal to the tiles, and several times as fast. That of the CPU takes a mask
as well: numbers that are added to the scores. FlexAttention has no backward on a CPU,
and on a GPU none that could be given the log-sum-exp of all blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.context_parallel.flash import (
    flash_attention_backward,
    flash_attention_forward,
)

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class BlockAttention(NamedTuple):
    """Forward and backward of a block; arguments as `flash_attention_forward`'s."""

    forward: Forward
    backward: Backward
    masked: bool = False
    """Whether both take a mask, as their last argument; tiles compute it if not."""


def cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's FlashAttention for the CPU. Of a query that sees no key it gives a
    log-sum-exp of 0."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=added(mask, q), scale=scale
    )
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1), float("-inf"))
    return out, lse


def cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, with an `out` and `lse` that may be those of more keys."""
    if mask is not None:  # -inf - (-inf) where a query sees no key
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=added(mask, q), scale=scale
    )


def added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """What the kernel adds to the scores: 0 where a query sees a key, or else -inf."""
    if mask is None:
        return None
    shape = len(q), *mask.shape[1:]
    return q.new_zeros(shape).masked_fill_(~mask, float("-inf"))


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 on a GPU: 16 bits, head dims that are multiples of 8."""
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return results[0], results[1]


def cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward. The kernel reads `lse` as if it had no gaps, and random numbers
    only for dropout; sequences of one length have no tables of where they begin."""
    no_random = torch.zeros(2, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
        0.0, causal, no_random, no_random, scale=scale,
    )  # fmt: skip


TILES = BlockAttention(flash_attention_forward, flash_attention_backward, True)
"""In torch's own operations: any device, any dtype."""
FUSED_CPU = BlockAttention(cpu_forward, cpu_backward, True)
FUSED_CUDA = BlockAttention(cuda_forward, cuda_backward)
"""Has not run on a GPU yet: shapes only are checked, on the meta device."""


def best_for(q: Tensor) -> BlockAttention:
    """The kernel for this tensor, and the tiles where there is none."""
    if q.device.type in ("cpu", "meta"):  # meta: a kernel that keeps no scores
        return FUSED_CPU
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return FUSED_CUDA if q.device.type == "cuda" and fits else TILES
