"""Matmul and reduce-scatter in one: a sum travels while the next part is computed.

    on its way to rank r + 1               sum for r-1    sum for r-2 ...
    computed meanwhile       part for r-1  part for r-2   part for r-3   part for r

Computes:   this rank's slice of the sum over ranks of `x W^T`.
Sends:      (N-1)/N of the whole y in N-1 messages, each under a matmul.
Leaves out: backward, which is `ring_all_gather_matmul`; fp32 sums of 16 bits; checks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def ring_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, dim: int, group: Any = None
) -> Tensor:
    """x is whole along `dim`, with this rank's features; the weight is [O, K / N]."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    slices = x.chunk(size, dim)

    total = F.linear(slices[left], weight)  # begins behind its rank, and ends there
    for step in range(1, size):
        arriving = torch.empty_like(total)
        calls = [
            dist.P2POp(dist.isend, total, group=group, group_peer=right),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=left),
        ]
        works = dist.batch_isend_irecv(calls)  # issue
        mine = F.linear(slices[(rank - 1 - step) % size], weight)  # compute
        for work in works:  # wait
            work.wait()
        total = arriving + mine
    return total
