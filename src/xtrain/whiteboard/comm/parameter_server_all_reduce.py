"""All-reduce through one rank: simple, and the first thing to outgrow.

Computes:   the sum of `tensor` over all ranks, in place, on every rank.
Sends:      one tensor from each worker, N-1 from the server: its link is the limit.
Leaves out: other operations than the sum, strided tensors, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def parameter_server_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Sum `tensor` over all ranks, in place; rank 0 of the group does all the work."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = tensor.detach()
    if rank != 0:
        dist.send(total, group_dst=0, group=group)
        dist.recv(total, group_src=0, group=group)
        return

    incoming = torch.empty_like(total)
    for worker in range(1, size):
        dist.recv(incoming, group_src=worker, group=group)
        total += incoming
    for worker in range(1, size):
        dist.send(total, group_dst=worker, group=group)
