"""All-gather and matmul in one: the slice that is here is multiplied, and travels on.

    on its way to rank r + 1     x_r       x_r-1       x_r-2
    multiplied meanwhile         x_r W^T   x_r-1 W^T   x_r-2 W^T   x_r-3 W^T

Computes:   `all_gather(x) W^T` for each weight that reads x, the columns of this rank.
Sends:      (N-1)/N of the whole x in N-1 messages, each under a matmul.
Leaves out: backward: dX by `ring_matmul_reduce_scatter`, dW as x circulates; checks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def ring_all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], dim: int, group: Any = None
) -> tuple[Tensor, ...]:
    """x is this rank's slice along `dim`, each weight its rows [O / N, K]."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    outputs: dict[int, list[Tensor]] = {}  # by the rank of which the slice is

    piece = x.contiguous()
    for step in range(size):
        arriving, works = torch.empty_like(piece), []
        if step < size - 1:  # issue; two slices are held, and never the whole x
            calls = [
                dist.P2POp(dist.isend, piece, group=group, group_peer=right),
                dist.P2POp(dist.irecv, arriving, group=group, group_peer=left),
            ]
            works = dist.batch_isend_irecv(calls)
        owner = (rank - step) % size
        outputs[owner] = [F.linear(piece, weight) for weight in weights]  # compute
        for work in works:  # wait
            work.wait()
        piece = arriving

    in_order = [outputs[owner] for owner in range(size)]
    return tuple(torch.cat(parts, dim) for parts in zip(*in_order, strict=True))
