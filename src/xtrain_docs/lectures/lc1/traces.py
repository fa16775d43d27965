"""Traces of the collectives of lc1."""

from ...traces import REGISTRY, Trace, recorded

RUNS = "xtrain_docs.lectures.lc1.runs"
"""Where a function is that needs a few lines around it."""


@REGISTRY
def ring_all_reduce(ranks: int = 4, autoplay: bool = False) -> Trace:
    """Reduce-scatter, then all-gather, around the ring."""
    return recorded("a ring all-reduce", "xtrain.comm.ring:ring_all_reduce",
                    "all_reduce", ranks, autoplay=autoplay)  # fmt: skip


@REGISTRY
def ring_reduce_scatter(ranks: int = 4) -> Trace:
    """Each rank ends with the sum of one cell."""
    return recorded("a ring reduce-scatter", "xtrain.comm.ring:ring_reduce_scatter",
                    "reduce_scatter", ranks)  # fmt: skip


@REGISTRY
def ring_all_gather(ranks: int = 4) -> Trace:
    """Each rank starts with one cell and ends with all."""
    return recorded("a ring all-gather", "xtrain.comm.ring:ring_all_gather",
                    "all_gather", ranks)  # fmt: skip


@REGISTRY
def tree_all_reduce(ranks: int = 8) -> Trace:
    """Up a binomial tree to the root, and down again."""
    return recorded("a tree all-reduce", "xtrain.comm.tree:tree_all_reduce",
                    "all_reduce", ranks, cells=1)  # fmt: skip


@REGISTRY
def halving_doubling_all_reduce(ranks: int = 4) -> Trace:
    """Half of what is left to the partner, then back."""
    return recorded(
        "a halving-doubling all-reduce",
        "xtrain.comm.tree:halving_doubling_all_reduce",
        "all_reduce",
        ranks,
    )


@REGISTRY
def parameter_server_all_reduce(ranks: int = 4) -> Trace:
    """Everything to rank 0 and back."""
    return recorded(
        "an all-reduce through a parameter server",
        "xtrain.comm.parameter_server:parameter_server_all_reduce",
        "all_reduce",
        ranks,
        cells=1,
    )


@REGISTRY
def broadcast(ranks: int = 8, root: int = 0) -> Trace:
    """A binomial tree: the number of ranks that have it doubles each step."""
    return recorded("a tree broadcast", "xtrain.comm.rooted:broadcast", "broadcast",
                    ranks, root=root, cells=1)  # fmt: skip


@REGISTRY
def broadcast_naive(ranks: int = 8, root: int = 0) -> Trace:
    """The root sends to everyone, one after the other."""
    return recorded(
        "a broadcast to one rank after another",
        "xtrain.comm.rooted:broadcast_naive",
        "broadcast",
        ranks,
        root=root,
        cells=1,
    )


@REGISTRY
def reduce(ranks: int = 8, root: int = 0) -> Trace:
    """The broadcast tree, backwards, adding."""
    return recorded("a tree reduce", "xtrain.comm.rooted:reduce", "reduce", ranks,
                    root=root, cells=1)  # fmt: skip


@REGISTRY
def all_reduce(ranks: int = 4) -> Trace:
    """The plain all_reduce of `xtrain.comm`."""
    return recorded("an all-reduce", "xtrain.comm.collectives:all_reduce",
                    "all_reduce", ranks)  # fmt: skip


@REGISTRY
def gather(ranks: int = 4, root: int = 0) -> Trace:
    """Everyone's cell to the root."""
    return recorded("a gather", "xtrain.comm.rooted:gather", "gather", ranks,
                    root=root)  # fmt: skip


@REGISTRY
def scatter(ranks: int = 4, root: int = 0) -> Trace:
    """One cell of the root to each rank."""
    return recorded("a scatter", "xtrain.comm.rooted:scatter", "scatter", ranks,
                    root=root)  # fmt: skip


@REGISTRY
def all_gather_into_tensor(ranks: int = 4) -> Trace:
    """One tensor with everyone's part, everywhere."""
    return recorded("an all-gather", "xtrain.comm.collectives:all_gather_into_tensor",
                    "all_gather", ranks)  # fmt: skip


@REGISTRY
def reduce_scatter_tensor(ranks: int = 4) -> Trace:
    """The sum of everyone's cell r, on rank r."""
    return recorded("a reduce-scatter", "xtrain.comm.collectives:reduce_scatter_tensor",
                    "reduce_scatter", ranks)  # fmt: skip


@REGISTRY
def all_to_all_single(ranks: int = 4) -> Trace:
    """Cell j of rank i becomes cell i of rank j: a transpose over ranks."""
    return recorded("an all-to-all", "xtrain.comm.all_to_all:all_to_all_single",
                    "all_to_all", ranks)  # fmt: skip


@REGISTRY
def barrier(ranks: int = 8) -> Trace:
    """Nobody leaves before everyone has come: messages without contents."""
    return recorded("a barrier", "xtrain.comm.collectives:barrier", "barrier", ranks)


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


@REGISTRY
def one_shot_all_reduce(ranks: int = 4) -> Trace:
    """Everything to everyone at once."""
    return recorded("a one-shot all-reduce", f"{RUNS}:one_shot_all_reduce_by_p2p",
                    "all_reduce", ranks, cells=1)  # fmt: skip


@REGISTRY
def exchange(ranks: int = 4) -> Trace:
    """Pairs of ranks swap their tensors at the same time."""
    return recorded("exchanges in pairs", f"{RUNS}:one_exchange", "all_reduce", ranks,
                    cells=1)  # fmt: skip
