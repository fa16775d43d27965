"""All-reduce by a binomial tree: sums travel up to rank 0, the result travels down.

Computes:   the sum of `tensor` over all ranks, in place, on every rank.
Sends:      2(N-1) tensors in all; ceil(log2 N) by the root; 2 ceil(log2 N) steps.
Leaves out: other operations than the sum, strided tensors, checks.

Few steps, but each moves the whole tensor: for small tensors, where latency rules.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    partial, incoming = tensor.detach(), torch.empty_like(tensor)

    distance = 1
    while distance < size:  # up: 1 -> 0 and 3 -> 2, then 2 -> 0, ...
        if rank % (2 * distance) == distance:
            dist.send(partial, group_dst=rank - distance, group=group)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.recv(incoming, group_src=rank + distance, group=group)
            partial += incoming
        distance *= 2

    while distance > 1:  # down: the same edges in the opposite order and direction
        distance //= 2
        if rank % (2 * distance) == distance:
            dist.recv(partial, group_src=rank - distance, group=group)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.send(partial, group_dst=rank + distance, group=group)
