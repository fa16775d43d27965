"""Gather: every rank's tensor arrives on one rank, in rank order.

Computes:   `gather_list[r]` on rank `dst` becomes rank r's `tensor`.
Sends:      one tensor from each rank but the root, which receives N-1 at once.
Leaves out: strided tensors, ranks inside the group (`group_dst`), checks.
"""

import torch.distributed as dist
from torch import Tensor


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Global rank `dst` gives a list with a tensor for each rank, the others None."""
    rank = dist.get_rank(group)
    root = dst if group is None else dist.get_group_rank(group, dst)
    if rank != root:
        mine = tensor.detach()
        calls = [dist.P2POp(dist.isend, mine, group=group, group_peer=root)]
    else:
        pieces = [piece.detach() for piece in gather_list or []]
        pieces[root].copy_(tensor.detach())  # a message needs two ranks
        calls = [  # all at once: no rank is kept waiting by another that is late
            dist.P2POp(dist.irecv, piece, group=group, group_peer=source)
            for source, piece in enumerate(pieces)
            if source != root
        ]
    # Both ends of a message in a batch, or neither: NCCL keeps the two kinds apart.
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()
