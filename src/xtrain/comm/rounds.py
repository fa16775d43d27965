"""Which messages were issued together: what an algorithm says, and a ledger reads.

    with one_round():            # post all, then wait
        works = [irecv(a, 1), isend(b, 1)]

An algorithm only counts here. Whether a `xtrain.comm.ledger` is open it does not know.
"""


class one_round:
    """The calls made inside are issued together: they count as one round.

    `with one_round() as number:` gives the round's number; `one_round(number)` goes on
    with it later, for the send of a receive that was posted ahead of its turn. Inside
    an open round another one changes nothing.
    """

    depth = 0  # how many are open, one inside the other
    last = 0  # the highest number given out
    number = 0  # of the open one

    def __init__(self, number: int | None = None):
        self._wanted = number

    def __enter__(self) -> int:
        if one_round.depth == 0:
            one_round.last += self._wanted is None
            one_round.number = self._wanted or one_round.last
        one_round.depth += 1
        return one_round.number

    def __exit__(self, *exc: object) -> None:
        one_round.depth -= 1


class paused:
    """Calls made inside are in no ledger: the checks' own questions."""

    depth = 0

    def __enter__(self) -> None:
        paused.depth += 1

    def __exit__(self, *exc: object) -> None:
        paused.depth -= 1
