"""Traffic of every algorithm by its name: `collective_traffic("ring_all_reduce", ...)`.

Here, too, are the all-to-all, in which every rank sends to every other, and the
barrier.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xtrain.plan.all_reduce_traffic import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    one_shot_all_reduce,
    parameter_server_all_reduce,
    recursive_doubling_all_reduce,
    tree_all_reduce,
)
from xtrain.plan.ring_traffic import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from xtrain.plan.rooted_traffic import (
    broadcast,
    broadcast_naive,
    gather,
    reduce,
    scatter,
    van_de_geijn_broadcast,
)
from xtrain.plan.traffic import Traffic, ceil_log2


def all_to_all(
    numel: int, ranks: int, splits: Sequence[Sequence[int]] | None = None
) -> Traffic:
    """Rank r sends a piece to every other rank; its own piece never leaves.

    `numel` is one rank's whole input and divides evenly, unless `splits[src][dst]`
    gives every piece (then `numel` is not read).
    """
    if splits is None:
        if numel % ranks:
            raise ValueError(f"{numel} elements do not divide among {ranks} ranks")
        splits = [[numel // ranks] * ranks] * ranks
    sent = tuple(sum(row) - row[rank] for rank, row in enumerate(splits))
    received = tuple(
        sum(row[rank] for row in splits) - splits[rank][rank] for rank in range(ranks)
    )
    return Traffic(sent, received, int(ranks > 1))


def barrier(numel: int, ranks: int) -> Traffic:
    """Dissemination barrier: a token of `numel` elements, ceil(log2 p) rounds."""
    each = (numel * ceil_log2(ranks),) * ranks
    return Traffic(each, each, ceil_log2(ranks))


ALGORITHMS: dict[str, Callable[..., Traffic]] = {
    function.__name__: function
    for function in (
        broadcast_naive,
        broadcast,
        van_de_geijn_broadcast,
        reduce,
        gather,
        scatter,
        ring_all_gather,
        ring_reduce_scatter,
        all_to_all,
        parameter_server_all_reduce,
        ring_all_reduce,
        tree_all_reduce,
        halving_doubling_all_reduce,
        recursive_doubling_all_reduce,
        one_shot_all_reduce,
        hierarchical_all_reduce,
        barrier,
    )
}


def collective_traffic(
    algorithm: str, numel: int, ranks: int, **options: Any
) -> Traffic:
    """`Traffic` in elements of the algorithm of that name.

    `numel` is the full tensor (for an all-gather or a gather what it ends with).
    Options: `root` where there is one, `local_ranks` for hierarchical, `splits` for
    all_to_all.
    ValueError for an unknown name, fewer than one rank or a negative size.
    """
    if algorithm not in ALGORITHMS:
        known = ", ".join(sorted(ALGORITHMS))
        raise ValueError(f"unknown algorithm {algorithm!r}; known: {known}")
    if ranks < 1 or numel < 0:
        raise ValueError(f"need ranks >= 1 and numel >= 0, got {ranks} and {numel}")
    return ALGORITHMS[algorithm](numel, ranks, **options)
