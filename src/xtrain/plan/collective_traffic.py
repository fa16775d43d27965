"""Traffic of every algorithm by its name: `collective_traffic("ring_all_reduce", ...)`.

All-reduces other than the ring, the all-to-all and the barrier are defined here, rings
and collectives with a root in `xtrain.plan.traffic`.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005 (recursive halving and
doubling).
"""

from collections.abc import Callable, Sequence
from typing import Any

from xtrain.plan.checks import require_one_of
from xtrain.plan.traffic import (
    Traffic,
    broadcast,
    broadcast_naive,
    ceil_log2,
    chunk_sizes,
    gather,
    reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    star_traffic,
    van_de_geijn_broadcast,
)


def parameter_server_all_reduce(numel: int, ranks: int, root: int = 0) -> Traffic:
    """All send `numel` to the root, which answers all: p-1 times that each way."""
    pieces = [numel] * ranks
    up = star_traffic(ranks, root, pieces, outward=False, together=False)
    return up.then(star_traffic(ranks, root, pieces, outward=True))


def tree_all_reduce(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Binomial reduce, then binomial broadcast of `numel`: 2 ceil(log2 p) rounds."""
    return reduce(numel, ranks, root).then(broadcast(numel, ranks, root))


def one_shot_all_reduce(numel: int, ranks: int) -> Traffic:
    """Every rank sends its `numel` to every other and adds up alone: p-1 times that."""
    each = (numel * (ranks - 1),) * ranks
    return Traffic(each, each, int(ranks > 1))


def recursive_doubling_all_reduce(numel: int, ranks: int) -> Traffic:
    """Swap all `numel` with rank xor 1, 2, 4, ...: log2(p) rounds.

    For a power of two; ValueError otherwise.
    """
    if ranks & (ranks - 1):
        raise ValueError(f"recursive doubling needs a power of two, got {ranks} ranks")
    each = (numel * ceil_log2(ranks),) * ranks
    return Traffic(each, each, ceil_log2(ranks))


def halving_doubling_all_reduce(numel: int, ranks: int) -> Traffic:
    """Recursive halving of `numel`, then doubling (Rabenseifner): log2 rounds each.

    Between two powers of two, each rank beyond the lower one (2^k) gives its tensor
    to rank - 2^k before, and gets the sum back after.
    """
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    # Each step gives away one half of the window and, on the way back, the other.
    moved = [sum(_windows(numel, core, rank)) for rank in range(core)] + [0] * extra
    for rank in (*range(extra), *range(core, ranks)):
        moved[rank] += numel
    rounds = 2 * ceil_log2(core) + 2 * (extra > 0)
    return Traffic(tuple(moved), tuple(moved), rounds)


def hierarchical_all_reduce(numel: int, ranks: int, local_ranks: int) -> Traffic:
    """Reduce-scatter in the node, ring all-reduce across nodes, all-gather inside.

    Ranks of a node are consecutive. The tensor of `numel` is padded to a multiple of
    `local_ranks`, so every rank takes one equal shard across. See
    `hierarchical_between_nodes` for the part that leaves the node.
    """
    across = hierarchical_between_nodes(numel, ranks, local_ranks)
    shard = -(-numel // local_ranks)
    inside = 2 * (local_ranks - 1) * shard
    return Traffic(
        tuple(inside + count for count in across.sent),
        tuple(inside + count for count in across.received),
        2 * (local_ranks - 1) + across.rounds,
    )


def hierarchical_between_nodes(numel: int, ranks: int, local_ranks: int) -> Traffic:
    """The middle step of `hierarchical_all_reduce`: what crosses the slow links.

    `numel` is the full tensor, as there; each rank takes 1/local_ranks of it across.
    """
    if local_ranks < 1 or ranks % local_ranks:
        raise ValueError(f"{ranks} ranks do not divide into nodes of {local_ranks}")
    across = ring_all_reduce(-(-numel // local_ranks), ranks // local_ranks)
    return Traffic(
        tuple(count for count in across.sent for _ in range(local_ranks)),
        tuple(count for count in across.received for _ in range(local_ranks)),
        across.rounds,
    )


def _windows(numel: int, ranks: int, rank: int) -> list[int]:
    """Sizes of the part that `rank` still works on, before each halving."""
    sizes, distance = [], ranks // 2
    while distance >= 1:
        sizes.append(numel)
        low_half, high_half = chunk_sizes(numel, 2)
        numel = high_half if rank & distance else low_half
        distance //= 2
    return sizes


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
    require_one_of("algorithm", algorithm, ALGORITHMS)
    if ranks < 1 or numel < 0:
        raise ValueError(f"need ranks >= 1 and numel >= 0, got {ranks} and {numel}")
    return ALGORITHMS[algorithm](numel, ranks, **options)
