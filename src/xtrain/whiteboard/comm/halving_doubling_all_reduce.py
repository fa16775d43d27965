"""All-reduce by halving and doubling (Rabenseifner): a ring's volume in fewer steps.

Computes:   the sum of `tensor` over all ranks, in place, on every rank.
Sends:      2(N-1)/N of the tensor in 2 log2(N) messages.
Leaves out: N not a power of two, other operations than the sum, strides, checks.

4 ranks:   0 <-> 2, 1 <-> 3 swap halves,   then 0 <-> 1, 2 <-> 3 swap quarters
"""

import torch
import torch.distributed as dist
from torch import Tensor


def halving_doubling_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Sum `tensor` over all ranks, in place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size & (size - 1):
        raise ValueError(f"{size} ranks: this needs a power of two")
    piece, steps = tensor.detach().view(-1), []

    distance = size // 2
    while distance > 0:  # reduce-scatter: give half of the piece away, sum the other
        partner = rank ^ distance
        low, high = piece.tensor_split(2)
        keep, give = (low, high) if rank < partner else (high, low)
        incoming = torch.empty_like(keep)
        _swap(give, incoming, partner, group)
        keep += incoming
        steps.append((keep, give, partner))
        piece, distance = keep, distance // 2

    for keep, give, partner in reversed(steps):  # all-gather: back, what is finished
        _swap(keep, give, partner, group)


def _swap(
    outgoing: Tensor, incoming: Tensor, partner: int, group: dist.ProcessGroup | None
) -> None:
    calls = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=partner),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=partner),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
