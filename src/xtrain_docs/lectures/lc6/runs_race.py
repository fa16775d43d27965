"""Runs behind the page of races: what each rank computes in each step of a ring."""

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.context_parallel import ring_attention, shard_sequence
from xtrain.context_parallel.block_attention import FUSED_CPU, BlockAttention


def pairs_by_step(balance: str, length: int) -> list[int]:
    """The queries and keys that this rank brings together in each step of the ring.

    Values tell their owner: they hold its rank.

    Args:
        length: tokens of each rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [0] * size

    def counted(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = q.shape[2], k.shape[2]
        assert not causal or rows == columns
        step = (rank - int(v.flatten()[0])) % size
        found[step] += rows * (rows + 1) // 2 if causal else rows * columns
        return FUSED_CPU.forward(q, k, v, causal, scale)

    whole = torch.randn(1, 1, length * size, 8)
    q, k = (shard_sequence(whole, 2, balance) for _ in range(2))
    v = torch.full_like(k, rank)
    counting = BlockAttention(counted, FUSED_CPU.backward)
    ring_attention(q, k, v, balance=balance, block_attention=counting)
    return found
