"""Where to cut a model into stages: evenly by cost, in the order of its layers.

    costs   0  6  6  6  6  9       embedding, four layers, head; in three parts

    cut     |0  6  6|6  6|9|       12, 12, 9: the most expensive set the pace

In every steady state of a pipeline all ranks wait for the slowest one: with several
stages a rank, for the one whose stages cost most together. So the first aim is that the
most expensive rank costs as little as possible, and of all such cuts the most even one
is taken.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

WIDTH = 600
"""Beginnings of a cut that are kept; one at least of those that end at an item."""
Begun = dict[tuple[int, tuple[int, ...]], tuple[int, int, tuple[int, ...]]]
"""Beginnings of cuts. By the item before which they end, and what each rank has that
gets more parts: the squares of the other ranks, and of the parts, and their ends."""


def balanced_cut(
    costs: Sequence[float], parts: int, ranks: Sequence[int] | None = None
) -> list[range]:
    """Cut items into consecutive parts, the most expensive rank as cheap as possible.

    Of such cuts it is the one with the least sum of squares, of the ranks and then of
    the parts, and of those the one whose first parts end first: the first stages hold
    the activations of most micro-batches.

    A part is a range of item numbers. Of an `nn.Sequential`, `model[part.start :
    part.stop]` is the stage, with the same parameters.

    With one part a rank no cut is better. With several, the search keeps the 600 most
    even beginnings of a cut after each part, which are all of them for few items; the
    cut is never worse than that which looks at parts alone.

    Args:
        costs: of each item, in the unit of your choice; not negative.
        parts: how many; each has at least one item.
        ranks: of each part, the rank that holds it, as `Schedule.holders` has them; a
            rank for each unless given.

    Raises:
        ValueError: there are fewer items than parts, a cost is not a number >= 0, or
            `ranks` does not name one for each part.
    """
    for item, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise ValueError(f"item {item} costs {cost}: a cost is finite, at least 0")
    if not 1 <= parts <= len(costs):
        raise ValueError(
            f"{len(costs)} items cannot be cut into {parts} parts: there is at least "
            "one part, and each has at least one item"
        )
    names = list(range(parts)) if ranks is None else list(ranks)
    if len(names) != parts:
        raise ValueError(f"{len(names)} ranks of {parts} parts: each part is on one")
    # Whole numbers, and exact: rounding must not decide between cuts.
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    sums = list(accumulate((int(cost * unit) for cost in exact), initial=0))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    search = _Search(sums, [numbers[name] for name in names])
    best: list[range] = []
    if search.ranks < parts:
        best = balanced_cut(costs, parts)
        search.limit = search.worst(best)
    while found := search.most_even():
        best = found
        search.limit = search.worst(found) - 1  # the next is better, or there is none
    return best


class _Search:
    """Lengthens beginnings of cuts, part by part, with no rank above a limit."""

    def __init__(self, sums: list[int], holders: list[int]):
        self.sums, self.holders = sums, holders
        self.ranks = len(set(holders))
        dearest = max(end - start for start, end in pairwise(sums))
        # There is a cut whose parts are not above their mean and the dearest item.
        self.limit = sums[-1] // len(holders) + 1 + dearest

    def most_even(self) -> list[range] | None:
        """The cut with the least squares, if one is within the limit."""
        begun: Begun = {(0, (0,) * self.ranks): (0, 0, (0,))}
        for part in range(len(self.holders)):
            begun = self._evenest(part, self._longer(part, begun))
        if not begun:
            return None
        _, _, ends = min(begun.values())
        return [range(start, end) for start, end in pairwise(ends)]

    def worst(self, cut: list[range]) -> int:
        """What the most expensive rank costs."""
        totals = [0] * self.ranks
        for rank, part in zip(self.holders, cut, strict=True):
            totals[rank] += self.sums[part.stop] - self.sums[part.start]
        return max(totals)

    def _longer(self, part: int, begun: Begun) -> Begun:
        """The beginnings with one part more, of every length that leaves a cut."""
        sums, rank, items = self.sums, self.holders[part], len(self.sums) - 1
        later = self.holders[part + 1 :]
        done, longer = rank not in later, Begun()
        for (start, held), (of_ranks, of_parts, ends) in begun.items():
            others = sum(held) - held[rank]
            first = start + 1 if later else items
            for end in range(first, items - len(later) + 1):
                cost = sums[end] - sums[start]
                total = held[rank] + cost
                if total > self.limit:
                    break
                left = 0 if done else total
                room = self.limit * len(set(later)) - others - left
                if sums[-1] - sums[end] > room:
                    continue
                key = end, (*held[:rank], left, *held[rank + 1 :])
                squares = of_ranks + (total**2 if done else 0)
                value = squares, of_parts + cost**2, (*ends, end)
                longer[key] = min(longer.get(key, value), value)
        return longer

    def _evenest(self, part: int, begun: Begun) -> Begun:
        """Of the beginnings that end alike those nearest to equal shares of ranks."""
        so_far, share = self.holders[: part + 1], self.sums[-1] // self.ranks
        due = [
            share * so_far.count(rank) // self.holders.count(rank)
            for rank in range(self.ranks)
        ]

        def uneven(key: tuple[int, tuple[int, ...]]) -> int:
            (end, held), (of_ranks, _, _) = key, begun[key]
            finished = self.sums[end] - sum(held)
            return (
                of_ranks
                - 2 * share * finished
                + sum(
                    (has - want) ** 2
                    for has, want in zip(held, due, strict=True)
                    if has
                )
            )

        at: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for key in begun:
            at.setdefault(key[0], []).append(key)
        most = WIDTH // max(len(at), 1) + 1
        kept = (
            keys if len(keys) <= most else sorted(keys, key=uneven)[:most]
            for keys in at.values()
        )
        return {key: begun[key] for keys in kept for key in keys}
