"""Who waits for whom: the graph of waits, a circle in it, and its words.

    rank 0   send to 1    needs rank 1's recv       host 0 -> host 1
    rank 1   send to 2    needs rank 2's recv       host 1 -> host 2
    rank 2   send to 0    needs rank 0's recv       host 2 -> host 0     a circle

A call that has begun *needs* events of other ranks: their end of the message, their
part of the collective. A rank that has not come to such an event yet is held up either
by the first call of the queue in which the event stands (it is posted, its turn has not
come), or by the call in which the program itself waits (it is not posted). A rank that
computes is held up by nothing: it may still come.

Every need must be met, so each circle is a deadlock. The states of the ranks need not
be of one moment: if one of the waits ended, it would end after the next one of the
circle, and so after itself. Only, within one state the counts must not be older than
the waits, and counts never go back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_LINES = 16  # of a circle that are shown


@dataclass(frozen=True, slots=True)
class Need:
    """An event that a call waits for: the `number`-th `event` of a queue of a rank.

    With the defaults it is the next thing that the rank does after its present wait.
    """

    rank: int
    queue: str = ""
    event: str = ""
    number: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits, as "recv(src=1) at ring.py:12", and all that it needs."""

    rank: int
    call: str
    needs: tuple[Need, ...]


@dataclass(slots=True)
class RankWaits:
    """What holds up one rank.

    Attributes:
        host: the call in which the program itself waits; None while it runs on.
        queues: the call that is first in each queue whose calls run one after another.
        posted, started: how often each event was put into its queue, and had its turn.
    """

    rank: int
    host: Wait | None = None
    queues: dict[str, Wait] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)

    def holding_up(self, need: Need) -> Wait | None:
        """The wait that keeps this rank from an event; None if nothing does."""
        if self.started.get(need.event, 0) >= need.number:
            return None
        if self.posted.get(need.event, 0) >= need.number:
            return self.queues.get(need.queue)
        return self.host


def find_circle(states: Iterable[RankWaits]) -> list[Wait]:
    """Waits of which each needs something that the next one holds up, the last one of
    the first; empty without a deadlock. It begins with the lowest rank.
    """
    by_rank = {state.rank: state for state in states}
    finished: set[Wait] = set()
    for state in by_rank.values():
        for wait in (state.host, *state.queues.values()):
            circle = wait and _search(wait, by_rank, finished)
            if circle:
                first = min(range(len(circle)), key=lambda i: circle[i].rank)
                return circle[first:] + circle[:first]
    return []


def _search(
    start: Wait, by_rank: Mapping[int, RankWaits], finished: set[Wait]
) -> list[Wait]:
    """Depth first, without recursion: a circle may have a thousand ranks."""
    path: list[Wait] = [start]
    branches = [iter(_next_waits(start, by_rank))]
    while path:
        following = next(branches[-1], None)
        if following is None:
            finished.add(path.pop())
            branches.pop()
        elif following in path:
            return path[path.index(following) :]
        elif following not in finished:
            path.append(following)
            branches.append(iter(_next_waits(following, by_rank)))
    return []


def _next_waits(wait: Wait, by_rank: Mapping[int, RankWaits]) -> list[Wait]:
    found = []
    for need in wait.needs:
        state = by_rank.get(need.rank)
        holder = state and state.holding_up(need)
        if holder:
            found.append(holder)
    return found


def in_words(circle: list[Wait]) -> str:
    """A line for each wait: its rank, its call, and whom it waits for."""
    ranks = [f"rank {wait.rank}" for wait in circle]
    left_out = max(0, len(circle) - MAX_LINES)
    if left_out:
        ranks[MAX_LINES:] = [f"{left_out} more ranks"]
    path = " -> ".join([*ranks, ranks[0]])
    lines = [f"deadlock, each of these calls waits for the next: {path}"]
    for wait, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        for_what = f"waits for rank {following.rank}"
        if following.rank == wait.rank and len(circle) > 1:
            for_what = "has its turn after the call in the next line"
        lines.append(f"  rank {wait.rank}: {wait.call} {for_what}")
    lines[1 + MAX_LINES :] = [f"  and {left_out} more"] if left_out else []
    return "\n".join(lines)
