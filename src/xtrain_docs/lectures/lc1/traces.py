"""Traces of the collectives of lc1: what readers see, and the function that runs."""

from typing import Any

from ...traces import REGISTRY, Trace, recorded

COMM = "xtrain.comm"
RUNS = "xtrain_docs.lectures.lc1.runs"
"""Where a function is that needs a few lines around it."""
TRACES: tuple[tuple[str, str, str, dict[str, int]], ...] = (
    ("a ring all-reduce", f"{COMM}.ring:ring_all_reduce", "all_reduce", {}),
    ("a ring reduce-scatter", f"{COMM}.ring:ring_reduce_scatter", "reduce_scatter", {}),
    ("a ring all-gather", f"{COMM}.ring:ring_all_gather", "all_gather", {}),
    ("a tree all-reduce", f"{COMM}.tree:tree_all_reduce", "all_reduce", {"cells": 1}),
    ("a halving-doubling all-reduce", f"{COMM}.tree:halving_doubling_all_reduce",
     "all_reduce", {}),
    ("an all-reduce through a parameter server",
     f"{COMM}.parameter_server:parameter_server_all_reduce", "all_reduce",
     {"cells": 1}),
    ("a tree broadcast", f"{COMM}.rooted:broadcast", "broadcast",
     {"root": 0, "cells": 1}),
    ("a broadcast to one rank after another", f"{COMM}.rooted:broadcast_naive",
     "broadcast", {"root": 0, "cells": 1}),
    ("a tree reduce", f"{COMM}.rooted:reduce", "reduce", {"root": 0, "cells": 1}),
    ("a gather", f"{COMM}.rooted:gather", "gather", {"root": 0}),
    ("a scatter", f"{COMM}.rooted:scatter", "scatter", {"root": 0}),
    ("an all-to-all", f"{COMM}.all_to_all:all_to_all_single", "all_to_all", {}),
    ("a barrier", f"{COMM}.collectives:barrier", "barrier", {}),
    ("a one-shot all-reduce", f"{RUNS}:one_shot_all_reduce_by_p2p", "all_reduce",
     {"cells": 1}),
    ("exchanges in pairs", f"{RUNS}:one_exchange", "all_reduce", {"cells": 1}),
)  # fmt: skip
NAMES = {
    "one_shot_all_reduce_by_p2p": "one_shot_all_reduce",
    "one_exchange": "exchange",
}
"""Where a page calls a trace otherwise than its function."""


def register(title: str, reference: str, kind: str, fixed: dict[str, Any]) -> None:
    """Let pages call it by the function's name."""

    def trace(ranks: int = 4, autoplay: bool = False) -> Trace:
        return recorded(title, reference, kind, ranks, autoplay=autoplay, **fixed)

    name = reference.partition(":")[2]
    trace.__name__ = NAMES.get(name, name)
    REGISTRY(trace)


for one in TRACES:
    register(*one)


@REGISTRY
def hierarchical_all_reduce(ranks: int = 8, local_ranks: int = 4) -> Trace:
    """Inside the nodes, across them, inside again."""
    return recorded(
        "a hierarchical all-reduce",
        f"{RUNS}:hierarchical_all_reduce_in_nodes",
        "all_reduce",
        ranks,
        cells=local_ranks * (ranks // local_ranks),
        local_ranks=local_ranks,
    )
