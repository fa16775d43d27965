"""Ring attention: queries stay, keys and values are passed around a ring of ranks.

    step     rank 0        rank 1        rank 2        keys and values of rank
    0        0             1             2             (its own: nothing has been sent)
    1        2             0             1             while a block is computed, the
    2        1             2             0             next one is on its way

K and V take N - 1 hops forward, and again backward. dK and dV of a block take N hops:
every rank that has computed with the block adds its part, and the last hop returns the
sum to the owner. Sums are in at least fp32.

Forward sends (N-1)/N of K and V per rank, backward that again and all of dK and dV.
A ring ends with the last step in which any rank sees a key: over runs of the sequence a
window makes it shorter, and so do documents that end early.
A rank keeps its own q, k, v, out and lse: 1/N of each.

Sources: Liu et al., Ring Attention with Blockwise Transformers, 2023; the backward of a
block is FlashAttention-2's (Dao, 2023).

Shapes: B batch, H heads, G key heads, S local sequence, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.ring_pass import RingPass
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


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    balance: Balance = "none",
    scale: float | None = None,
    group: ProcessGroup | None = None,
    *,
    block_attention: BlockAttention | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    mask: SequenceMask | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Exact attention over the sequences of all ranks together.

    Args:
        q: [B, H, S, D], this rank's queries.
        k, v: [B, G, S, D], its keys and values, sent unrepeated; G divides H.
            Cross-attention (neither causal nor balanced) may have another number of
            them than of queries.
        causal: a token sees itself and those before it in the whole sequence.
        balance: which tokens a rank holds, as `shard_sequence` cut them.
        scale: of the scores; 1 / sqrt(D) unless given.
        block_attention: how a block is computed; the fastest for the device unless
            given.
        window: a token sees itself and the `window - 1` before it.
        documents: [B, S], whole numbers, cut as the tokens are: a token sees those of
            its own document. A negative number is padding: it sees no key, no query
            sees it, and its output is 0.
        mask: of `sequence_mask`, made once a batch, in place of window and documents.
        dropout: the factors of probabilities by their heads and places in the whole
            sequence; the forward and the backward of a block ask for them, tile by
            tile, and the tiles compute it.

    Returns:
        [B, H, S, D]. Without gradients nothing is saved, as a prefill needs it.

    Raises:
        ValueError: on every rank: shapes that do not fit, or that differ between ranks.
    """
    q, k, v = cast_by_autocast(q, k, v)
    check_attention(
        "ring_attention",
        q, k, v, group, causal=causal, scale=scale, balance=balance,
        window=window, documents=documents, mask=mask,
    )  # fmt: skip
    mask = mask_of_call(q, k, causal, balance, window, documents, group, mask)
    mask = mask.dropping(dropout, slice(0, q.shape[1]))
    attention = block_attention or best_for(q)
    scale = checked_scale(q, k, v, scale)
    return _RingAttention.apply(mask, group, attention, scale, q, k, v)


class _RingAttention(torch.autograd.Function):
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
        ring = RingPass(group)
        running = RunningAttention(attention, q, scale)
        for owner, kv in ring.visits(torch.stack([k, v]), mask.steps):
            running.add(mask.blocks(ring.rank, owner), kv)
        out, lse = running.result()
        ctx.mask, ctx.group, ctx.attention, ctx.scale = mask, group, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        ring, sums = RingPass(ctx.group), RingPass(ctx.group)
        arriving, steps = None, ctx.mask.steps
        visits = ring.visits(torch.stack([k, v]), steps)
        for step, (owner, kv) in enumerate(visits, 1):
            part = gradients.of_blocks(ctx.mask.blocks(ring.rank, owner), kv)
            if not any(ctx.needs_input_grad[5:]):
                continue
            sums.wait()  # for the sum over the ranks before this one
            dkv = sum_of(arriving, part, kv)
            by = 1 if step < steps else 1 - steps  # the last hop returns to the owner
            arriving = sums.pass_on(dkv, by)
        dq = gradients.dq.to(q.dtype)
        if arriving is None:
            return None, None, None, None, dq, None, None
        sums.wait()
        dk, dv = arriving.to(k.dtype)
        return None, None, None, None, dq, dk, dv
