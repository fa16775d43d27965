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
from torch.distributed import ProcessGroup

from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH
from xtrain.context_parallel.balance import Balance
from xtrain.context_parallel.block_attention import BlockAttention, best_for
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.flash import checked_scale
from xtrain.context_parallel.planned import mask_of_call
from xtrain.context_parallel.running_attention import (
    Gradients,
    RunningAttention,
    first_derivative,
    sum_of,
)
from xtrain.context_parallel.sequence_mask import Dropout, SequenceMask


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    *,
    balance: Balance = "none",
    block_attention: BlockAttention | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    mask: SequenceMask | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """`ring_attention` by gathering; the arguments are the same."""
    q, k, v = cast_by_autocast(q, k, v)
    check_attention(
        "all_gather_attention",
        q, k, v, group, causal=causal, scale=scale,
        balance=balance, window=window, documents=documents, mask=mask,
    )  # fmt: skip
    mask = mask_of_call(q, k, causal, balance, window, documents, group, mask)
    mask = mask.dropping(dropout, slice(0, q.shape[1]))
    attention = block_attention or best_for(q)
    scale = checked_scale(q, k, v, scale)
    return _AllGatherAttention.apply(mask, group, attention, scale, q, k, v)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask: SequenceMask,
        group: ProcessGroup | None,
        attention: BlockAttention,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        rank, _ = rank_and_size(group)
        running = RunningAttention(attention, q, scale)
        for owner, kv in enumerate(gather_kv(k, v, group)):
            running.add(mask.blocks(rank, owner), kv)
        out, lse = running.result()
        ctx.mask, ctx.group, ctx.attention, ctx.scale = mask, group, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rank, _ = rank_and_size(ctx.group)
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        parts = []
        for owner, kv in enumerate(gather_kv(k, v, ctx.group)):
            part = gradients.of_blocks(ctx.mask.blocks(rank, owner), kv)
            parts.append(sum_of(None, part, kv))
        dq = gradients.dq.to(q.dtype)
        if not any(ctx.needs_input_grad[5:]):
            return None, None, None, None, dq, None, None
        dkv = torch.empty_like(parts[0])
        TORCH.reduce_scatter(dkv, torch.cat(parts), group=ctx.group).wait()
        dk, dv = dkv.to(k.dtype)
        return None, None, None, None, dq, dk, dv


def gather_kv(k: Tensor, v: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keys and values of all ranks, [N, 2, B, G, S, D]."""
    _, size = rank_and_size(group)
    kv = torch.stack([k, v])
    gathered = kv.new_empty((size * 2, *kv.shape[1:]))
    TORCH.all_gather(gathered, kv, group=group).wait()
    return gathered.unflatten(0, (size, 2))
