"""Broadcast down a binomial tree: every step doubles the number of ranks that have it.

Computes:   `tensor` becomes rank `src`'s on every rank.
Sends:      N-1 tensors in all, the root ceil(log2 N) of them, in ceil(log2 N) steps.
Leaves out: strided tensors, ranks inside the group (`group_src`), checks.

8 ranks, root 0:   0 -> 4,   0 -> 2  4 -> 6,   0 -> 1  2 -> 3  4 -> 5  6 -> 7
"""

import torch.distributed as dist
from torch import Tensor


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Copy the tensor of global rank `src` into every rank's `tensor`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = src if group is None else dist.get_group_rank(group, src)
    place = (rank - root) % size  # places are ranks turned so that the root has place 0
    flat = tensor.detach()

    distance = (1 << (size - 1).bit_length()) // 2
    while distance > 0:
        if place % (2 * distance) == distance:
            dist.recv(flat, group_src=(rank - distance) % size, group=group)
        elif place % (2 * distance) == 0 and place + distance < size:
            dist.send(flat, group_dst=(rank + distance) % size, group=group)
        distance //= 2
