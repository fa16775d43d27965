"""Attention on one rank with any mask of a sequence, in memory linear in its length."""

from typing import Any

import torch
from torch import Tensor

from xtrain.context_parallel.block_attention import BlockAttention, best_for
from xtrain.context_parallel.flash import checked_scale
from xtrain.context_parallel.running_attention import (
    Gradients,
    RunningAttention,
    add_up,
    first_derivative,
)
from xtrain.context_parallel.sequence_mask import SequenceMask


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: SequenceMask, scale: float | None = None
) -> Tensor:
    """Attention of q [B, H, S, D] over k, v [B, G, T, D] with the mask of one rank."""
    scale = checked_scale(q, k, v, scale)
    return _MaskedAttention.apply(mask, best_for(q), scale, q, k, v)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask: SequenceMask,
        attention: BlockAttention,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        running = RunningAttention(attention, q, scale)
        running.add(mask.block(0, 0), torch.stack([k, v]))
        out, lse = running.result()
        ctx.mask, ctx.attention, ctx.scale = mask, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        block, kv = ctx.mask.block(0, 0), torch.stack([k, v])
        dk, dv = add_up(None, gradients.of_block(block, kv), block, kv).to(k.dtype)
        return None, None, None, gradients.dq.to(q.dtype), dk, dv
