"""All-reduce over fast links inside a node and slow ones between nodes.

Computes:   the sum of `tensor` over all ranks of a mesh of nodes, in place.
Sends:      2(G-1)/G of the tensor in its node of G, 2(K-1)/K of 1/G between K nodes.
Leaves out: other operations than the sum, strided tensors, checks.

    node 0   0 - 1      1. reduce-scatter inside each node
             |   |      2. all-reduce of each chunk between the nodes
    node 1   2 - 3      3. all-gather inside each node
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def hierarchical_all_reduce(
    tensor: Tensor, intra_group: dist.ProcessGroup, inter_group: dist.ProcessGroup
) -> None:
    """Sum `tensor`, in place, over this rank's node and over its peers elsewhere."""
    flat = tensor.detach().view(-1)
    chunks = flat.tensor_split(dist.get_world_size(intra_group))
    mine = chunks[dist.get_rank(intra_group)]
    parts = mine.tensor_split(dist.get_world_size(inter_group))

    _reduce_scatter(chunks, intra_group)
    _reduce_scatter(parts, inter_group)
    _all_gather(parts, inter_group)
    _all_gather(chunks, intra_group)


def _reduce_scatter(chunks: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size - 1):
        mine = chunks[(rank - 2 - step) % size]
        incoming = torch.empty_like(mine)
        _send_right_recv_left(chunks[(rank - 1 - step) % size], incoming, group)
        mine += incoming


def _all_gather(chunks: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size - 1):
        arriving = chunks[(rank - 1 - step) % size]
        _send_right_recv_left(chunks[(rank - step) % size], arriving, group)


def _send_right_recv_left(
    outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    calls = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
