"""All-reduce over two kinds of links: fast ones inside a node, slow ones between nodes.

    node 0   0 - 1 - 2 - 3        1. reduce-scatter inside each node
             |   |   |   |        2. all-reduce each shard across the nodes
    node 1   4 - 5 - 6 - 7        3. all-gather inside each node

With G ranks on each of K nodes, a rank sends 2(K-1)/K * 1/G of the tensor over a slow
link, where a flat ring would send nearly all of it twice over the slowest one.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.functional import pad

from xtrain.comm.calls import check_call
from xtrain.comm.checks import rank_and_size
from xtrain.comm.reduce_op import divide_if_average
from xtrain.comm.ring import all_gather_chunks, reduce_scatter_chunks


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
    local, local_size = rank_and_size(intra_group)
    node, nodes = rank_and_size(inter_group)
    check_call(
        "hierarchical_all_reduce", intra_group, tensor, op=op,
        rules=[are_two_axes(intra_group, inter_group)], other_group=inter_group,
    )  # fmt: skip
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() % local_size:
        flat = pad(flat, (0, -flat.numel() % local_size))
    shards = flat.tensor_split(local_size)
    parts = shards[local].tensor_split(nodes)
    step_op = ReduceOp.SUM if op == ReduceOp.AVG else op

    reduce_scatter_chunks(shards, step_op, intra_group)
    reduce_scatter_chunks(parts, step_op, inter_group)
    divide_if_average(parts[node], op, local_size * nodes)
    all_gather_chunks(parts, inter_group)
    all_gather_chunks(shards, intra_group)
    if flat.data_ptr() != tensor.data_ptr():  # padded, or was not contiguous
        tensor.detach().copy_(flat[: tensor.numel()].view(tensor.shape))


def are_two_axes(
    intra_group: ProcessGroup | None, inter_group: ProcessGroup | None
) -> tuple[bool, str]:
    """A rule: the groups are two axes of a mesh, so they share this rank alone."""
    if intra_group is None or inter_group is None:
        return False, f"needs both groups, got {intra_group=}, {inter_group=}"
    intra, inter = map(dist.get_process_group_ranks, (intra_group, inter_group))
    message = f"{intra} and {inter} share other ranks than this one, {dist.get_rank()}"
    return len(set(intra) & set(inter)) == 1, message
