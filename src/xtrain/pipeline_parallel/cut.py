"""Where to cut a model into stages: evenly by cost, in the order of its layers.

    costs   0  6  6  6  6  9       embedding, four layers, head; in three parts

    cut     |0  6  6|6  6|9|       12, 12, 9: the most expensive set the pace

In every steady state of a pipeline all ranks wait for the slowest one, which is that of
the slowest stage if each rank has one. So the first aim is that the most expensive part
costs as little as possible, and of all such cuts the most even one is taken. With two
stages a rank, the sum over both counts, which this cut does not look at.
"""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite

Cuts = dict[int, tuple[Fraction, tuple[int, ...]]]
"""The best cut of so many first items: its sum of squares, and where its parts end."""


def balanced_cut(costs: Sequence[float], parts: int) -> list[range]:
    """Cut items into consecutive parts, the most expensive part as cheap as possible.

    Of such cuts it is the one with the least sum of squares, and of those the one whose
    first parts end first: the first stages hold the activations of most micro-batches.

    A part is a range of item numbers. Of an `nn.Sequential`, `model[part.start :
    part.stop]` is the stage, with the same parameters.

    Args:
        costs: of each item, in the unit of your choice; not negative.
        parts: how many; each has at least one item.

    Raises:
        ValueError: there are fewer items than parts, or a cost is not a number >= 0.
    """
    for item, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise ValueError(f"item {item} costs {cost}: a cost is finite, at least 0")
    if not 1 <= parts <= len(costs):
        raise ValueError(
            f"{len(costs)} items cannot be cut into {parts} parts: there is at least "
            "one part, and each has at least one item"
        )
    # Sums of the first items, as exact numbers: rounding must not decide between cuts.
    sums = list(accumulate(map(Fraction, costs), initial=Fraction(0)))
    most = _least_most(sums, parts)
    best: Cuts = {0: (Fraction(0), (0,))}
    for _ in range(parts):
        longer: Cuts = {}
        for start, (squares, ends) in best.items():
            for end in range(start + 1, len(sums)):
                part = sums[end] - sums[start]
                if part > most:
                    break
                found = squares + part**2, (*ends, end)
                longer[end] = min(longer.get(end, found), found)
        best = longer
    ends = best[len(costs)][1]
    return [range(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def _least_most(sums: list[Fraction], parts: int) -> Fraction:
    """What the most expensive of so many parts costs at least, by bisection."""
    numbers = range(len(sums))
    costs = sorted({sums[end] - sums[start] for end in numbers for start in range(end)})
    return costs[bisect_left(costs, True, key=lambda most: _fits(sums, parts, most))]


def _fits(sums: list[Fraction], parts: int, most: Fraction) -> bool:
    """Whether so many parts of at most this cost hold all items: fill each in turn."""
    start = needed = 0
    while start < len(sums) - 1 and needed <= parts:
        end = start + 1
        while end < len(sums) and sums[end] - sums[start] <= most:
            end += 1
        if end == start + 1:
            return False  # one item alone costs more
        start, needed = end - 1, needed + 1
    return needed <= parts
