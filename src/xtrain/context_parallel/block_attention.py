"""How one block is computed: readable tiles, or a kernel that returns the log-sum-exp.

Merging blocks needs each one's log-sum-exp, and their backward needs to be given that
of all of them. `F.scaled_dot_product_attention` offers neither; the kernels below it
do. They are equal to the tiles, and several times as fast.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.context_parallel.balance import Block
from xtrain.context_parallel.flash import (
    flash_attention_backward,
    flash_attention_forward,
)
from xtrain.context_parallel.online_softmax import merge

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


class RunningAttention:
    """The attention of some queries over keys that come in blocks.

    Args:
        q: [B, H, S, D].
    """

    def __init__(self, attention: BlockAttention, q: Tensor, scale: float):
        self._attention, self._q, self._scale = attention, q, scale
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._out = torch.zeros_like(q, dtype=self._wide)
        self._lse = self._out.new_full(q.shape[:-1], float("-inf"))

    def add(self, block: Block | None, kv: Tensor) -> None:
        """Take in what the queries see of some keys and values, [2, B, G, T, D]."""
        if block is None:
            return
        rows, (keys, values) = block.queries, kv[:, :, :, block.keys]
        out, lse = self._attention.forward(
            self._q[:, :, rows], keys, values, block.causal, self._scale
        )
        seen = self._out[:, :, rows], self._lse[:, :, rows]
        self._out[:, :, rows], self._lse[:, :, rows] = merge(
            seen, (out.to(self._wide), lse.to(self._wide))
        )

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in q's dtype, and log-sum-exp."""
        return self._out.to(self._q.dtype), self._lse


class Gradients:
    """The backward of `RunningAttention`, block by block.

    `dq` is added up here; the gradients of keys and values belong to whoever holds
    them.
    """

    def __init__(
        self,
        attention: BlockAttention,
        grad_out: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ):
        self._attention, self._scale = attention, scale
        self._grad_out, self._q, self._out, self._lse = grad_out, q, out, lse
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros_like(q, dtype=self._wide)

    def add(self, block: Block | None, kv: Tensor) -> Tensor:
        """What these queries contribute to the gradients of keys and values."""
        dkv = torch.zeros_like(kv, dtype=self._wide)
        if block is None:
            return dkv
        rows, (keys, values) = block.queries, kv[:, :, :, block.keys]
        dq, dk, dv = self._attention.backward(
            self._grad_out[:, :, rows],
            self._q[:, :, rows],
            keys,
            values,
            self._out[:, :, rows],
            self._lse[:, :, rows],
            block.causal,
            self._scale,
        )
        self.dq[:, :, rows] += dq
        dkv[0][:, :, block.keys] = dk
        dkv[1][:, :, block.keys] = dv
        return dkv
