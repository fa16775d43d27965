"""Ring attention: queries stay, keys and values go round, nobody holds the sequence.

    step     rank 0        rank 1        rank 2        keys and values of rank
    0        0             1             2             (its own: nothing has been sent)
    1        2             0             1             while a block is computed, the
    2        1             2             0             next one is on its way

N - 1 rotations of K and V forward. Backward rotates them again, and with each block its
dK and dV: every rank adds its part and passes them on, and the last hop brings them
home, so they take N. They are added up in at least fp32.

Forward sends (N-1)/N of K and V per rank, backward that again and all of dK and dV.
A rank keeps its own q, k, v, out and lse: 1/N of each.

Sources: Liu et al., Ring Attention with Blockwise Transformers, 2023; the backward of a
block is FlashAttention-2's (Dao, 2023).

Shapes: B batch, H heads, G key heads, S local sequence, D head dim.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.p2p import post_all
from xtrain.context_parallel.autocast import cast_by_autocast
from xtrain.context_parallel.balance import Block
from xtrain.context_parallel.block_attention import BlockAttention, best_for
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.flash import checked_scale
from xtrain.context_parallel.running_attention import (
    Gradients,
    RunningAttention,
    add_up,
)
from xtrain.context_parallel.sequence_mask import SequenceMask, gather_documents


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    balance: str = "none",
    scale: float | None = None,
    group: ProcessGroup | None = None,
    *,
    block_attention: BlockAttention | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Exact attention over the sequences of all ranks together.

    Args:
        q: [B, H, S, D], this rank's queries.
        k, v: [B, G, S, D], its keys and values; G divides H, and they are sent as they
            are, not repeated. Cross-attention (neither causal nor balanced) may have
            another number of them than of queries.
        causal: a token sees itself and those before it in the whole sequence.
        balance: which tokens a rank holds, as `shard_sequence` cut them.
        scale: of the scores; 1 / sqrt(D) unless given.
        block_attention: how a block is computed; the fastest for the device unless
            given.
        window: a token sees itself and the `window - 1` before it.
        documents: [B, S], whole numbers, cut as the tokens are: a token sees those of
            its own document. A negative number is padding: it sees nothing, nobody
            sees it, and its output is 0.

    Returns:
        [B, H, S, D]. Without gradients nothing is kept: this is also a prefill.

    Raises:
        ValueError: on every rank: shapes that do not fit, or that differ between ranks.
    """
    q, k, v = cast_by_autocast(q, k, v)
    check_attention(
        "ring_attention", q, k, v, group, causal=causal, scale=scale, balance=balance,
        window=window, documents=documents,
    )  # fmt: skip
    documents = gather_documents(documents, group)
    mask = SequenceMask(
        rank_and_size(group)[1], q.shape[2], k.shape[2], causal, balance, window,
        documents,
    )  # fmt: skip
    attention = block_attention or best_for(q)
    scale = checked_scale(q, k, v, scale)
    return _RingAttention.apply(Ring(mask, group), attention, scale, q, k, v)


class Ring:
    """The order in which keys and values come by, and what is seen of them."""

    def __init__(self, mask: SequenceMask, group: ProcessGroup | None):
        self.mask, self.group = mask, group
        self.rank, self.size = rank_and_size(group)

    def rotate(self, x: Tensor) -> "Rotation":
        """Begin to send `x` to the next rank."""
        if self.size == 1:
            return Rotation(x, x, [])
        arriving = torch.empty_like(x)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = post_all([(x, after)], [(arriving, before)], self.group)
        return Rotation(x, arriving, works)

    def blocks(self, kv: Tensor) -> Iterator[tuple[Block | None, Tensor]]:
        """Each rank's keys and values in turn; while one is used, the next travels."""
        kept = None
        for step in range(self.size):
            travels = self.rotate(kv) if step < self.size - 1 else None
            yield self.mask.block(self.rank, (self.rank - step) % self.size), kv
            if travels is not None:
                kv, kept = travels.wait(), travels
        del kept


class Rotation(NamedTuple):
    """A tensor on its way to the next rank, and what arrives meanwhile.

    Keep it for one step after the wait: gloo frees a message that has only just arrived
    by spinning until its own thread lets go of it.
    """

    sent: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        attention: BlockAttention,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        running = RunningAttention(attention, q, scale)
        for block, kv in ring.blocks(torch.stack([k, v])):
            running.add(block, kv)
        out, lse = running.result()
        ctx.ring, ctx.attention, ctx.scale = ring, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        dkv, travels, kept = None, None, None
        for block, kv in ring.blocks(torch.stack([k, v])):
            part = gradients.of_block(block, kv)
            if not any(ctx.needs_input_grad[4:]):
                continue
            if travels is not None:  # what ranks before us have added up for these keys
                dkv, kept = travels.wait(), travels
            travels = ring.rotate(add_up(dkv, part, block, kv))
        dq = gradients.dq.to(q.dtype)
        if travels is None:
            return None, None, None, dq, None, None
        dk, dv = travels.wait().to(k.dtype)  # the last hop has brought our own home
        del kept
        return None, None, None, dq, dk, dv
