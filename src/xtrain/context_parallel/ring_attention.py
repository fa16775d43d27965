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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.p2p import post_all
from xtrain.comm.work import Work
from xtrain.context_parallel.balance import Block, block_of
from xtrain.context_parallel.block_attention import (
    BlockAttention,
    Gradients,
    RunningAttention,
    best_for,
)
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.flash import checked_scale


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
) -> Tensor:
    """Exact attention over the sequences of all ranks together.

    Args:
        q: [B, H, S, D], this rank's queries.
        k, v: [B, G, S, D], its keys and values; G divides H, and they are sent as they
            are, not repeated.
        causal: a token sees itself and those before it in the whole sequence.
        balance: which tokens a rank holds, as `shard_sequence` cut them.
        scale: of the scores; 1 / sqrt(D) unless given.
        block_attention: how a block is computed; the fastest for the device unless
            given.

    Returns:
        [B, H, S, D]. Without gradients nothing is kept: this is also a prefill.

    Raises:
        ValueError: on every rank: shapes that do not fit, or that differ between ranks.
    """
    check_attention("ring_attention", q, k, v, group, balance, causal=causal)
    ring = Ring(group, k.shape[2], causal, balance)
    chosen = block_attention or best_for(q)
    return _RingAttention.apply(ring, chosen, checked_scale(q, k, v, scale), q, k, v)


class Ring:
    """The order in which keys and values come by, and what is seen of them."""

    def __init__(
        self, group: ProcessGroup | None, length: int, causal: bool, balance: str
    ):
        self.rank, self.size = rank_and_size(group)
        self.group, self.length = group, length
        self.causal, self.balance = causal, balance

    def rotate(self, x: Tensor) -> tuple[Tensor, Work]:
        """Send `x` to the next rank; what arrives, and the work to wait for."""
        arriving = torch.empty_like(x)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = post_all([(x, after)], [(arriving, before)], self.group)
        return arriving, Work(works, keep=x)

    def blocks(self, kv: Tensor) -> Iterator[tuple[Block | None, Tensor]]:
        """Each rank's keys and values in turn; while one is used, the next travels."""
        for step in range(self.size):
            arriving, work = kv, Work()
            if step < self.size - 1:
                arriving, work = self.rotate(kv)
            yield self.block((self.rank - step) % self.size), kv
            work.wait()
            kv = arriving

    def block(self, owner: int) -> Block | None:
        """What our queries see of a rank's keys."""
        return block_of(self.balance, self.rank, owner, self.length, self.causal)


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
        sum_so_far, arrives = None, Work()
        for block, kv in ring.blocks(torch.stack([k, v])):
            dkv = gradients.add(block, kv)
            arrives.wait()  # what the ranks before us have added up for these keys
            if sum_so_far is not None:
                dkv += sum_so_far
            sum_so_far, arrives = ring.rotate(dkv)
        arrives.wait()  # the last hop brings our own home
        assert sum_so_far is not None
        dk, dv = sum_so_far.to(k.dtype)
        return None, None, None, gradients.dq.to(q.dtype), dk, dv
