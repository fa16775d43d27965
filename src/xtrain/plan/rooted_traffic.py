"""Traffic of the collectives with a root: one rank sends to all, or all to one.

    star        the root itself sends to, or receives from, every other rank
    binomial    who has the tensor passes it on: 0 -> 4, then 0 -> 2 and 4 -> 6,
                then every even rank to the next odd one (8 ranks)

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005 (binomial); van de Geijn,
1994 (scatter + all-gather broadcast).
"""

from collections.abc import Sequence

from xtrain.plan.ring_traffic import ring_all_gather
from xtrain.plan.traffic import Traffic, ceil_log2, chunk_sizes


def broadcast_naive(numel: int, ranks: int, root: int = 0) -> Traffic:
    """The root sends all `numel` elements to every other rank over its one link."""
    return star_traffic(ranks, root, [numel] * ranks, outward=True)


def broadcast(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Binomial tree: who has the `numel` elements passes them on, log2(p) rounds."""
    sent, received = [0] * ranks, [0] * ranks
    for parent, child in _binomial_edges(ranks, root):
        sent[parent] += numel
        received[child] += numel
    return Traffic(tuple(sent), tuple(received), ceil_log2(ranks))


def reduce(numel: int, ranks: int, root: int = 0) -> Traffic:
    """The broadcast run backwards: every edge carries a partial sum of `numel` up."""
    mirror = broadcast(numel, ranks, root)
    return Traffic(mirror.received, mirror.sent, mirror.rounds)


def scatter(numel: int, ranks: int, root: int = 0) -> Traffic:
    """The root cuts `numel` elements and sends every other rank its piece directly."""
    return star_traffic(ranks, root, chunk_sizes(numel, ranks), outward=True)


def gather(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Every rank sends its piece to the root, which ends with `numel` elements."""
    return star_traffic(ranks, root, chunk_sizes(numel, ranks), outward=False)


def van_de_geijn_broadcast(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Scatter `numel` elements from the root, all-gather them around the ring."""
    return scatter(numel, ranks, root).then(ring_all_gather(numel, ranks))


def star_traffic(
    ranks: int,
    root: int,
    pieces: Sequence[int],
    outward: bool,
    together: bool = True,
) -> Traffic:
    """One message between the root and every other rank; `pieces` by rank."""
    leaves = tuple(0 if rank == root else pieces[rank] for rank in range(ranks))
    hub = tuple(sum(leaves) if rank == root else 0 for rank in range(ranks))
    sent, received = (hub, leaves) if outward else (leaves, hub)
    return Traffic(sent, received, min(1, ranks - 1) if together else ranks - 1)


def _binomial_edges(ranks: int, root: int) -> list[tuple[int, int]]:
    """(parent, child) pairs of the broadcast tree, in the order of the rounds.

    8 ranks, root 0: first 0 -> 4, then 0 -> 2 and 4 -> 6, then every even rank to
    the next odd one.
    """
    edges = []
    half = 1 << ceil_log2(ranks) >> 1
    while half:
        for position in range(0, ranks - half, 2 * half):
            edges.append(((root + position) % ranks, (root + position + half) % ranks))
        half //= 2
    return edges
