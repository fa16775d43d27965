"""Zigzag split: an early and a late piece of the sequence for every rank.

    2N pieces on N ranks    rank r has r and 2N-1-r     0 7 | 1 6 | 2 5 | 3 4

Computes:   this rank's part of tokens, labels, activations, or the numbers 0, 1, 2 ...
            of the positions, which the rotary embedding and the labels' shift need.
Sends:      nothing: every rank has the whole of it.
Leaves out: gathering the gradients in backward, sequences to be padded, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def shard_sequence(
    x: Tensor, dim: int, balance: str = "none", group: Any = None
) -> Tensor:
    """A causal query at t has t + 1 keys: with zigzag each rank has as many in all."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if balance == "none":  # runs: the last rank has most to do
        return x.chunk(size, dim)[rank]
    if balance == "striped":  # every N-th token: nearly balanced
        return x[(slice(None),) * (dim % x.dim()) + (slice(rank, None, size),)]
    pieces = x.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)
