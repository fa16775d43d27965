"""Vocab-parallel embedding: each rank holds its share of the rows of the table.

    ids whole -> look up the own ids, zeros for the others -> g, the sum -> y whole

Computes:   `full(ids)` on every rank; backward, the gradient of this rank's rows.
Sends:      forward 2(N-1)/N of y, of which one rank has each row; nothing backward.
Leaves out: reduce-scatter of the sum, padding of the vocabulary, ids outside of it.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class VocabParallelEmbedding(nn.Module):
    """Rank r holds rows r V / N up to, but not including, (r + 1) V / N."""

    def __init__(self, full: nn.Embedding, group: Any = None):
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        parts = full.weight.detach().chunk(dist.get_world_size(group), dim=0)
        self.weight = nn.Parameter(parts[rank].clone())
        self.first = rank * len(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        others = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(others, 0), self.weight)
        # Zeroed after the look-up, or row 0 would stand, and learn, for all others.
        mine = rows.masked_fill(others.unsqueeze(-1), 0.0)
        return _AllReduceIdentity.apply(mine, self.group)


class _AllReduceIdentity(torch.autograd.Function):
    """g: y is the sum, and every part of a sum has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
