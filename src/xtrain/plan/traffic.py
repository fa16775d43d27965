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

The algorithms are in `rooted_traffic`, `ring_traffic` and `all_reduce_traffic`, and by
their names in `collective_traffic`.

Source of the lower bound 2(p-1)/p: Patarasuk and Yuan, JPDC 69(2), 2009.
"""

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
