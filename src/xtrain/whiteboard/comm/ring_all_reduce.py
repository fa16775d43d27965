"""All-reduce around a ring: a reduce-scatter, then an all-gather.

Computes:   the sum of `tensor` over all ranks, in place, on every rank.
Sends:      2(N-1)/N of the tensor in 2(N-1) messages, all to the right neighbour.
Leaves out: other operations than the sum, strided tensors, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.detach().view(-1).tensor_split(size)
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest

    for step in range(size - 1):  # reduce-scatter: rank r ends with the sum of chunk r
        mine = chunks[(rank - 2 - step) % size]
        arriving = incoming[: mine.numel()]
        _send_right_recv_left(chunks[(rank - 1 - step) % size], arriving, group)
        mine += arriving

    for step in range(size - 1):  # all-gather: what is finished travels on, and stays
        arriving = chunks[(rank - 1 - step) % size]
        _send_right_recv_left(chunks[(rank - step) % size], arriving, group)


def _send_right_recv_left(
    outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup | None
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    # Both at once: if all sent first, all would wait for a receiver.
    calls = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=right),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
