"""Scatter: one rank has a tensor for every rank; the gather run backwards.

Computes:   every rank's `tensor` becomes its entry of rank `src`'s `scatter_list`.
Sends:      N-1 tensors from the root, at once; the other ranks none.
Leaves out: strided tensors, ranks inside the group (`group_src`), checks.
"""

import torch.distributed as dist
from torch import Tensor


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Global rank `src` gives a list with a tensor for each rank, the others None."""
    rank = dist.get_rank(group)
    root = src if group is None else dist.get_group_rank(group, src)
    if rank != root:
        mine = tensor.detach()
        calls = [dist.P2POp(dist.irecv, mine, group=group, group_peer=root)]
    else:
        pieces = [piece.detach() for piece in scatter_list or []]
        tensor.detach().copy_(pieces[root])  # a message needs two ranks
        calls = [
            dist.P2POp(dist.isend, piece, group=group, group_peer=target)
            for target, piece in enumerate(pieces)
            if target != root
        ]
    # Both ends of a message in a batch, or neither: NCCL keeps the two kinds apart.
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()
