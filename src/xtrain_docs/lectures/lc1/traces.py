"""Traces of the collectives of lc1: what readers see, and the function that runs."""

from typing import Any

import torch
import torch.distributed as dist

from xtrain import comm

from ...traces import REGISTRY, Trace, recorded

HERE = "xtrain_docs.lectures.lc1.traces"
COMM = "xtrain.comm"
TRACES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "ring_all_reduce": ("a ring all-reduce", f"{COMM}.ring", "all_reduce", {}),
    "ring_reduce_scatter":
        ("a ring reduce-scatter", f"{COMM}.ring", "reduce_scatter", {}),
    "ring_all_gather": ("a ring all-gather", f"{COMM}.ring", "all_gather", {}),
    "tree_all_reduce":
        ("a tree all-reduce", f"{COMM}.tree", "all_reduce", {"cells": 1}),
    "halving_doubling_all_reduce":
        ("a halving-doubling all-reduce", f"{COMM}.tree", "all_reduce", {}),
    "parameter_server_all_reduce":
        ("an all-reduce through a parameter server", f"{COMM}.parameter_server",
         "all_reduce", {"cells": 1}),
    "broadcast": ("a tree broadcast", f"{COMM}.rooted", "broadcast", {"cells": 1}),
    "broadcast_naive":
        ("a broadcast to one rank after another", f"{COMM}.rooted", "broadcast",
         {"cells": 1}),
    "reduce": ("a tree reduce", f"{COMM}.rooted", "reduce", {"cells": 1}),
    "gather": ("a gather", f"{COMM}.rooted", "gather", {}),
    "scatter": ("a scatter", f"{COMM}.rooted", "scatter", {}),
    "all_to_all_single": ("an all-to-all", f"{COMM}.all_to_all", "all_to_all", {}),
    "barrier": ("a barrier", f"{COMM}.collectives", "barrier", {}),
    "one_shot_all_reduce":
        ("a one-shot all-reduce", HERE, "all_reduce", {"cells": 1}),
    "hierarchical_all_reduce":
        ("a hierarchical all-reduce", HERE, "all_reduce", {"local_ranks": 4}),
    "exchange": ("exchanges in pairs", HERE, "all_reduce", {"cells": 1}),
}  # fmt: skip


def one_shot_all_reduce(tensor: torch.Tensor) -> None:
    """With our all-to-all, which shows its messages, in the place of torch's."""
    theirs = dist.all_to_all_single
    dist.all_to_all_single = comm.all_to_all_single
    try:
        comm.one_shot_all_reduce(tensor)
    finally:
        dist.all_to_all_single = theirs


def hierarchical_all_reduce(tensor: torch.Tensor, local_ranks: int) -> None:
    """With `local_ranks` consecutive ranks a node."""
    shape = (dist.get_world_size() // local_ranks, local_ranks)
    mesh = comm.init_mesh(shape, ("node", "local"))
    intra, inter = mesh["local"].get_group(), mesh["node"].get_group()
    comm.hierarchical_all_reduce(tensor, intra_group=intra, inter_group=inter)


def exchange(tensor: torch.Tensor) -> None:
    """Neighbours send each other their tensors, 0 and 1, 2 and 3; both have the sum."""
    partner, incoming = dist.get_rank() ^ 1, tensor.clone()
    comm.exchange(tensor, partner, incoming, partner)
    tensor.add_(incoming)


def register(name: str) -> None:
    """Let pages call a trace by its function's name."""
    title, module, kind, fixed = TRACES[name]

    def trace(ranks: int = 4, autoplay: bool = False) -> Trace:
        reference = f"{module}:{name}"
        return recorded(title, reference, kind, ranks, autoplay=autoplay, **fixed)

    trace.__name__ = name
    REGISTRY(trace)


for one in TRACES:
    register(one)
