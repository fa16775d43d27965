"""What every rank sends and receives in a collective, to the last element.

`numel` is always the size of the FULL tensor, as in `xtrain.plan.cost`: what a
broadcast or an all-reduce has on every rank; what an all-gather or a gather ends with;
what a reduce-scatter or a scatter starts from; one rank's whole input of an all-to-all.

Counts are elements; `Traffic.bytes(itemsize)` turns them into bytes. They are exact
for any number of ranks and any number of elements: an uneven tensor is cut as
`torch.tensor_split` cuts it, the first `numel % ranks` chunks one element longer.

`rounds` is the length of the longest chain in which every message had to wait for
the one before it; messages that a rank issues together share a round, as they do in
`xtrain.comm.message_rounds`. The alpha-beta times of `xtrain.plan.cost` are
stricter: there a rank sends and receives only one message at a time. (An empty
chunk sends no message: a tensor of fewer elements than ranks may take fewer
rounds.)

    ring all-reduce, 4 ranks, M elements

      reduce-scatter, 3 steps      all-gather, 3 steps
      rank r sends 3 chunks        rank r sends 3 chunks
      3/4 M                        3/4 M                     = 2 (4-1)/4 M = 1.5 M

    star        the root itself sends to, or receives from, every other rank
    binomial    who has the tensor passes it on: 0 -> 4, then 0 -> 2 and 4 -> 6,
                then every even rank to the next odd one (8 ranks)

Here are rings and the collectives with a root; `collective_traffic` has the others, and
all by name.

Sources: Patarasuk and Yuan, JPDC 69(2), 2009 (ring, lower bound 2(p-1)/p); Thakur,
Rabenseifner and Gropp, IJHPCA 19(1), 2005 (binomial); van de Geijn, 1994 (broadcast by
scatter and all-gather).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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


def ring_reduce_scatter(numel: int, ranks: int) -> Traffic:
    """`numel` elements in, rank r keeps the sum of chunk r: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=-1)


def ring_all_gather(numel: int, ranks: int) -> Traffic:
    """Every rank gives its chunk and ends with all `numel`: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=0)


def ring_all_reduce(numel: int, ranks: int) -> Traffic:
    """Reduce-scatter, then all-gather: 2(p-1)/p of `numel`, whatever p is."""
    return ring_reduce_scatter(numel, ranks).then(ring_all_gather(numel, ranks))


def _ring(chunks: Sequence[int], first: int) -> Traffic:
    """p-1 steps around the ring; rank r starts with chunk r + first and walks down.

    It sends p-1 chunks: all but the next one up. What arrives is what its left
    neighbour, r-1, sends.
    """
    ranks, numel = len(chunks), sum(chunks)
    sent = [numel - chunks[(rank + first + 1) % ranks] for rank in range(ranks)]
    received = [sent[rank - 1] for rank in range(ranks)]
    return Traffic(tuple(sent), tuple(received), ranks - 1)


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
    ranks: int, root: int, pieces: Sequence[int], outward: bool, together: bool = True
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
