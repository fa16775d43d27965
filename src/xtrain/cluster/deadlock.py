"""When no rank can run: the circle of waits, or the ranks that have ended."""

from collections.abc import Sequence

from xtrain.cluster.scheduler import Rank
from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words


class Deadlock(RuntimeError):
    """No rank can run, and nothing will happen that one waits for.

    Attributes:
        cycle: global ranks that wait for one another, in the order of their waits;
            where they wait for a rank that has ended, all that wait.
    """

    def __init__(self, text: str, cycle: Sequence[int] = ()):
        super().__init__(text)
        self.cycle = list(cycle)

    def __reduce__(self) -> tuple:
        return Deadlock, (str(self), self.cycle)


class PeerEnded(RuntimeError):
    """A rank waits for one that has raised."""


def what_is_wrong(
    ranks: Sequence[Rank], lines: dict[int, str]
) -> dict[Rank, BaseException]:
    """The error of each rank that waits, when none can run.

    Args:
        lines: where each of them waits, for calls that have not kept it.
    """
    waiting = [rank for rank in ranks if rank.needs is not None]
    failed = [rank for rank in ranks if rank.done and rank.error is not None]
    if failed:
        first = failed[0]
        why = f"rank {first.number} has raised {type(first.error).__name__}"
        return {rank: PeerEnded(f"{_call(rank, lines)}: {why}") for rank in waiting}
    states = []
    for rank in waiting:
        needs = tuple(Need(other) for other in missing_of(rank))
        wait = Wait(rank.number, _call(rank, lines), needs)
        states.append(RankWaits(rank.number, host=wait))
    circle = find_circle(states)
    if circle:
        text, cycle = in_words(circle), [wait.rank for wait in circle]
    else:
        text, cycle = _without_circle(waiting, lines), [rank.number for rank in waiting]
    return {rank: Deadlock(text, cycle) for rank in waiting}


def _without_circle(waiting: Sequence[Rank], lines: dict[int, str]) -> str:
    shown = ["deadlock: no rank can run"]
    here = {rank.number for rank in waiting}
    for rank in waiting[:8]:
        missing = missing_of(rank)
        over = [other for other in missing if other not in here]
        few = ", ".join(map(str, over[:8]))
        why = f", but rank {few} has returned" if over else ""
        shown.append(f"  rank {rank.number}: {_call(rank, lines)}{why}")
    if len(waiting) > 8:
        shown.append(f"  and {len(waiting) - 8} more")
    return "\n".join(shown)


def missing_of(rank: Rank) -> list[int]:
    """The ranks that a rank waits for."""
    return [] if rank.needs is None else rank.needs.missing()


def _call(rank: Rank, lines: dict[int, str]) -> str:
    assert rank.needs is not None
    text = rank.needs.describe()
    return text if " at " in text else f"{text} at {lines.get(rank.number, '?')}"
