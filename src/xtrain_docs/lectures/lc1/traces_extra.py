"""Traces of lc1 whose run needs a few lines around the function."""

import torch.distributed as dist
from torch import Tensor

from xtrain import comm

from . import REGISTRY, Trace, recorded

HERE = "xtrain_docs.traces.lc1_extra"


def hierarchical_all_reduce_in_nodes(tensor: Tensor, local_ranks: int) -> None:
    """`hierarchical_all_reduce` with `local_ranks` consecutive ranks a node."""
    from xtrain_docs.runs_lc1 import node_groups

    intra, inter = node_groups(local_ranks)
    comm.hierarchical_all_reduce(tensor, intra_group=intra, inter_group=inter)


def one_shot_all_reduce_by_p2p(tensor: Tensor) -> None:
    """`one_shot_all_reduce` over our all-to-all, whose messages can be seen."""
    from xtrain_docs.runs_lc1 import one_shot_by_p2p

    one_shot_by_p2p(tensor)


def one_exchange(tensor: Tensor) -> None:
    """Every rank swaps its whole tensor with its neighbour: 0 with 1, 2 with 3."""
    partner = dist.get_rank() ^ 1
    incoming = tensor.clone()
    comm.exchange(tensor, partner, incoming, partner)
    tensor.add_(incoming)


@REGISTRY
def hierarchical_all_reduce(ranks: int = 8, local_ranks: int = 4) -> Trace:
    """Inside the nodes, across them, inside again."""
    return recorded(f"{HERE}:hierarchical_all_reduce_in_nodes", "all_reduce", ranks,
                    cells=local_ranks * (ranks // local_ranks),
                    local_ranks=local_ranks)  # fmt: skip


@REGISTRY
def one_shot_all_reduce(ranks: int = 4) -> Trace:
    """Everything to everyone at once."""
    return recorded(f"{HERE}:one_shot_all_reduce_by_p2p", "all_reduce", ranks, cells=1)


@REGISTRY
def exchange(ranks: int = 4) -> Trace:
    """Pairs of ranks swap their tensors at the same time."""
    return recorded(f"{HERE}:one_exchange", "all_reduce", ranks, cells=1)
