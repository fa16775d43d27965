"""Reduce up a binomial tree: the broadcast run backwards, adding at every edge.

Computes:   the sum of `tensor` over all ranks, on rank `dst`; the others keep theirs.
Sends:      one tensor from each rank but the root, in ceil(log2 N) steps.
Leaves out: other operations than the sum, strided tensors, `group_dst`, checks.

8 ranks, root 0:   1 -> 0  3 -> 2  5 -> 4  7 -> 6,   2 -> 0  6 -> 4,   4 -> 0
"""

import torch
import torch.distributed as dist
from torch import Tensor


def reduce(tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Sum every rank's `tensor` into that of global rank `dst`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = dst if group is None else dist.get_group_rank(group, dst)
    place = (rank - root) % size  # places are ranks turned so that the root has place 0
    partial, incoming = tensor.detach().clone(), torch.empty_like(tensor)

    distance = 1
    while distance < size:
        if place % (2 * distance) == distance:
            dist.send(partial, group_dst=(rank - distance) % size, group=group)
            return  # this rank's share is on its way up
        if place + distance < size:
            dist.recv(incoming, group_src=(rank + distance) % size, group=group)
            partial += incoming
        distance *= 2
    tensor.detach().copy_(partial)  # only the root comes here
