"""Which messages were issued together: what an algorithm states, and a ledger reads.

    with one_round():            # post all, then wait
        works = [irecv(a, 1), isend(b, 1)]

`with one_round() as number:` gives the round's number, where rounds are counted;
`one_round(number)` goes on with it later, for the send of a receive that was posted
ahead of its turn. An algorithm only states it. Who counts is in COUNTERS: the ledger
puts `Round` there; in a copy of an algorithm it stays empty.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

COUNTERS: list[Callable[[int | None], AbstractContextManager[int | None]]] = []


def one_round(number: int | None = None) -> AbstractContextManager[int | None]:
    """The calls made inside are issued together: where rounds are counted, as one."""
    return COUNTERS[0](number) if COUNTERS else nullcontext(number)


class Round:
    """A round that is counted. Inside an open one another changes nothing."""

    depth = 0  # how many are open, one inside the other
    last = 0  # the highest number given out
    number = 0  # of the open one

    def __init__(self, number: int | None = None):
        self._wanted = number

    def __enter__(self) -> int:
        if Round.depth == 0:
            Round.last += self._wanted is None
            Round.number = self._wanted or Round.last
        Round.depth += 1
        return Round.number

    def __exit__(self, *exc: object) -> None:
        Round.depth -= 1


class paused:
    """Calls made inside are in no ledger: the checks' own questions."""

    depth = 0

    def __enter__(self) -> None:
        paused.depth += 1

    def __exit__(self, *exc: object) -> None:
        paused.depth -= 1
