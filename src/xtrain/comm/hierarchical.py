"""All-reduce over two kinds of links: fast ones inside a node, slow ones between nodes.

    node 0   0 - 1 - 2 - 3        1. reduce-scatter inside each node
             |   |   |   |        2. all-reduce each shard across the nodes
    node 1   4 - 5 - 6 - 7        3. all-gather inside each node

With G ranks a node, the slow links carry 1/G of the tensor each, where a flat ring
would send nearly all of it twice over the slowest link.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.functional import pad

from xtrain.comm.checks import check_call
from xtrain.comm.reduce_op import finish
from xtrain.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def hierarchical_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    intra_group: ProcessGroup | None = None,
    inter_group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor`, in place, over all ranks of a two-dimensional mesh.

    Args:
        intra_group: the ranks of this node, the mesh's inner axis.
        inter_group: the ranks with this one's place on the other nodes, its outer axis.

    The tensor is padded to a multiple of the node's size. Each rank sends
    2(G-1)/G of it inside its node and 2(K-1)/K of 1/G of it between K nodes.
    """
    _, intra_size = check_call("hierarchical_all_reduce", intra_group, tensor, op=op)
    _, inter_size = check_call("hierarchical_all_reduce", inter_group, tensor, op=op)
    flat = tensor.detach().reshape(-1)
    flat = pad(flat, (0, -flat.numel() % intra_size))
    shard = torch.empty_like(flat[: flat.numel() // intra_size])
    step_op = ReduceOp.SUM if op == ReduceOp.AVG else op

    ring_reduce_scatter(shard, flat, step_op, intra_group)
    ring_all_reduce(shard, step_op, inter_group)
    finish(shard, op, intra_size * inter_size)
    ring_all_gather(flat, shard, intra_group)

    tensor.detach().copy_(flat[: tensor.numel()].view(tensor.shape))
