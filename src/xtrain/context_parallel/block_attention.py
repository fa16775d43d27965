"""How one block is computed: readable tiles, or a kernel that returns the log-sum-exp.

Merging blocks needs each one's log-sum-exp, and their backward needs to be given that
of all of them. `F.scaled_dot_product_attention` offers neither; the kernels below it
do. They are equal to the tiles, and several times as fast.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.context_parallel.flash import (
    flash_attention_backward,
    flash_attention_forward,
)

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class BlockAttention(NamedTuple):
    """Forward and backward of a block; arguments as `flash_attention_forward`'s."""

    forward: Forward
    backward: Backward


def cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's FlashAttention for the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )


def cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, with an `out` and `lse` that may be those of more keys."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
    )


TILES = BlockAttention(flash_attention_forward, flash_attention_backward)
"""In torch's own operations: any device, any dtype."""
FUSED_CPU = BlockAttention(cpu_forward, cpu_backward)


def best_for(q: Tensor) -> BlockAttention:
    """The kernel for this tensor's device, and the tiles where there is none."""
    return FUSED_CPU if q.device.type == "cpu" else TILES
