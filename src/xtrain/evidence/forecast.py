"""What a test is expected to take and to prove, from an earlier record.

for every symbol and every number of ranks     the cheapest test comes first
then the other tests of the record             each by its number of ranks
then what the record does not know
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xtrain.evidence.store import Entries

UNKNOWN_SECONDS = 0.5
CHEAP = 0.15  # tests that take less are alike
FIRST, OTHER, UNKNOWN = range(3)


@dataclass(frozen=True, slots=True)
class Expected:
    """Of one test: when to run it, its largest world, its seconds there."""

    order: int
    ranks: int
    seconds: float


NOTHING_KNOWN = Expected(UNKNOWN, 0, UNKNOWN_SECONDS)


def expected(record: Entries) -> dict[str, Expected]:
    """Of each test of a record."""
    first: dict[tuple[str, int], str] = {}
    ranks: dict[str, int] = {}

    def cost(name: str) -> tuple[int, str]:
        seconds = max(record[name].value["seconds"], CHEAP)
        return math.ceil(math.log2(seconds)), name  # not for hundredths of a second

    for name, entry in record.items():
        ran = entry.value["ran"].items()
        pairs = [(symbol, size) for symbol, at in ran for _, size in at or ()]
        ranks[name] = max((size for _, size in pairs), default=0)
        for pair in pairs:
            if pair not in first or cost(name) < cost(first[pair]):
                first[pair] = name
    early = set(first.values())
    return {
        name: Expected(
            FIRST if name in early else OTHER, ranks[name], entry.value["seconds"]
        )
        for name, entry in record.items()
    }


def seconds(
    tests: Iterable[str],
    known: dict[str, Expected],
    times_longer: Callable[[int], float],
) -> float:
    """All of them, one after another.

    Args:
        times_longer: than in the record, by the ranks of a test; 0 if it is skipped.
    """
    found = (known.get(name, NOTHING_KNOWN) for name in tests)
    return sum(test.seconds * times_longer(test.ranks) for test in found)
