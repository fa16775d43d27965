"""All-gather attention: every rank gathers all keys and values, and keeps its queries.

    forward    all-gather K, V       attention of the own queries over them
    backward   all-gather K, V again    dK, dV of all ranks: reduce-scatter

The bytes are those of ring attention, in one collective rather than N - 1 messages, and
nothing is hidden under compute. The gathered keys and values take memory for the whole
sequence while a layer computes: with few key heads that is little.

Source: Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.collective_choice import TORCH
from xtrain.context_parallel.block_attention import (
    BlockAttention,
    Gradients,
    RunningAttention,
    best_for,
)
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.flash import checked_scale
from xtrain.context_parallel.ring_attention import Ring


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    *,
    balance: str = "none",
    block_attention: BlockAttention | None = None,
) -> Tensor:
    """`ring_attention` by gathering; the arguments are the same."""
    check_attention("all_gather_attention", q, k, v, group, balance, causal=causal)
    ranks = Ring(group, k.shape[2], causal, balance)
    chosen = block_attention or best_for(q)
    scale = checked_scale(q, k, v, scale)
    return _AllGatherAttention.apply(ranks, chosen, scale, q, k, v)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ring,
        attention: BlockAttention,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        running = RunningAttention(attention, q, scale)
        for owner, kv in enumerate(gather(torch.stack([k, v]), ranks)):
            running.add(ranks.block(owner), kv)
        out, lse = running.result()
        ctx.ranks, ctx.attention, ctx.scale = ranks, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        ranks: Ring = ctx.ranks
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        everyone = gather(torch.stack([k, v]), ranks)
        parts = [gradients.add(ranks.block(i), kv) for i, kv in enumerate(everyone)]
        dkv = torch.empty_like(parts[0])
        TORCH.reduce_scatter(dkv, torch.cat(parts), group=ranks.group).wait()
        dk, dv = dkv.to(k.dtype)
        return None, None, None, gradients.dq.to(q.dtype), dk, dv


def gather(kv: Tensor, ranks: Ring) -> Tensor:
    """Keys and values of all ranks, [N, 2, B, G, S, D]."""
    everyone = kv.new_empty((ranks.size * 2, *kv.shape[1:]))
    TORCH.all_gather(everyone, kv, group=ranks.group).wait()
    return everyone.unflatten(0, (ranks.size, 2))
