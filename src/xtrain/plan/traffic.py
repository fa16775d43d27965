"""What every rank sends and receives, algorithm by algorithm, to the last element.

`numel` is always the size of the FULL tensor, as in `xtrain.plan.cost`: what a
broadcast or an all-reduce has on every rank; what an all-gather or a gather ends with;
what a reduce-scatter or a scatter starts from; one rank's whole input of an all-to-all.

Counts are elements; `Traffic.bytes(itemsize)` turns them into bytes. They are exact
for any number of ranks and any number of elements: an uneven tensor is cut as
`torch.tensor_split` cuts it, the first `numel % ranks` chunks one element longer.

    ring all-reduce, 4 ranks, M elements

      reduce-scatter, 3 steps      all-gather, 3 steps
      rank r sends 3 chunks        rank r sends 3 chunks
      3/4 M                        3/4 M                     = 2 (4-1)/4 M = 1.5 M

`rounds` is the length of the longest chain in which every message had to wait for
the one before it; messages that a rank issues together share a round, as they do in
`xtrain.comm.ledger.message_rounds`. The alpha-beta times of `xtrain.plan.cost` are
stricter: there a rank sends and receives only one message at a time. (An empty
chunk sends no message: a tensor of fewer elements than ranks may take fewer
rounds.)

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005 (binomial, recursive
halving and doubling); van de Geijn, 1994 (scatter + all-gather broadcast);
Patarasuk and Yuan, JPDC 69(2), 2009 (ring, and the lower bound 2(p-1)/p).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FP32 = 4
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements (or bytes) per rank of one collective; index = rank in the group."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    rounds: int

    @property
    def total(self) -> int:
        """Everything that crossed a link."""
        return sum(self.sent)

    @property
    def max_sent(self) -> int:
        """The busiest sender: the rank that decides how long it takes."""
        return max(self.sent)

    @property
    def max_received(self) -> int:
        """The busiest receiver."""
        return max(self.received)

    @property
    def average_sent(self) -> Fraction:
        """Total over ranks, exact."""
        return Fraction(self.total, len(self.sent))

    def bytes(self, itemsize: int) -> "Traffic":
        """The same counts in bytes, for elements of `itemsize` bytes."""
        return Traffic(
            tuple(count * itemsize for count in self.sent),
            tuple(count * itemsize for count in self.received),
            self.rounds,
        )

    def then(self, other: "Traffic") -> "Traffic":
        """This collective followed by another one among the same ranks."""
        return Traffic(
            tuple(a + b for a, b in zip(self.sent, other.sent, strict=True)),
            tuple(a + b for a, b in zip(self.received, other.received, strict=True)),
            self.rounds + other.rounds,
        )


def chunk_sizes(numel: int, parts: int) -> list[int]:
    """Lengths of `torch.tensor_split`: the first `numel % parts` are one longer."""
    base, extra = divmod(numel, parts)
    return [base + (part < extra) for part in range(parts)]


def all_reduce_lower_bound(ranks: int) -> Fraction:
    """Least elements an average rank must send in an all-reduce, per element.

    Adding up p partial values takes p-1 transfers; p-1 ranks must then learn the
    sum. That is 2(p-1) transfers of every element, shared among p ranks.
    """
    return Fraction(2 * (ranks - 1), ranks)


def ceil_log2(ranks: int) -> int:
    """Rounds until all ranks are reached when their number doubles each time."""
    return (ranks - 1).bit_length()


# ------------------------------------------------------------- one rank to all


def broadcast_naive(numel: int, ranks: int, root: int = 0) -> Traffic:
    """The root sends all `numel` elements to every other rank over its one link."""
    return _star_traffic(ranks, root, [numel] * ranks, outward=True)


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
    return _star_traffic(ranks, root, chunk_sizes(numel, ranks), outward=True)


def gather(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Every rank sends its piece to the root, which ends with `numel` elements."""
    return _star_traffic(ranks, root, chunk_sizes(numel, ranks), outward=False)


def van_de_geijn_broadcast(numel: int, ranks: int, root: int = 0) -> Traffic:
    """Scatter `numel` elements from the root, all-gather them around the ring."""
    return scatter(numel, ranks, root).then(ring_all_gather(numel, ranks))


# ----------------------------------------------------------------- ring family


def ring_reduce_scatter(numel: int, ranks: int) -> Traffic:
    """`numel` elements in, rank r keeps the sum of chunk r: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=-1)


def ring_all_gather(numel: int, ranks: int) -> Traffic:
    """Every rank gives its chunk and ends with all `numel`: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=0)


def ring_all_reduce(numel: int, ranks: int) -> Traffic:
    """Reduce-scatter, then all-gather: 2(p-1)/p of `numel`, whatever p is."""
    return ring_reduce_scatter(numel, ranks).then(ring_all_gather(numel, ranks))


# ---------------------------------------------------------- other all-reduces


def parameter_server_all_reduce(numel: int, ranks: int, root: int = 0) -> Traffic:
    """All send `numel` to the root, which answers all: p-1 times that each way."""
    pieces = [numel] * ranks
    up = _star_traffic(ranks, root, pieces, outward=False, together=False)
    return up.then(_star_traffic(ranks, root, pieces, outward=True))


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


# -------------------------------------------------------------------- helpers


def _star_traffic(
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


def _ring(chunks: Sequence[int], first: int) -> Traffic:
    """p-1 steps around the ring; rank r starts with chunk r + first and walks down.

    It sends p-1 chunks: all but the next one up. What arrives is what its left
    neighbour, r-1, sends.
    """
    ranks, numel = len(chunks), sum(chunks)
    sent = [numel - chunks[(rank + first + 1) % ranks] for rank in range(ranks)]
    received = [sent[rank - 1] for rank in range(ranks)]
    return Traffic(tuple(sent), tuple(received), ranks - 1)


def _windows(numel: int, ranks: int, rank: int) -> list[int]:
    """Sizes of the part that `rank` still works on, before each halving."""
    sizes, distance = [], ranks // 2
    while distance >= 1:
        sizes.append(numel)
        low_half, high_half = chunk_sizes(numel, 2)
        numel = high_half if rank & distance else low_half
        distance //= 2
    return sizes


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
