"""What each rank did in virtual time, kept while a cluster runs.

    rank 0   | compute | wait in recv | compute |     all of its clock
    between        [-- message 0 to 1 --]             in flight meanwhile

The scheduler has a `RunRecorder` when the cluster records, else None. It is told where
clocks jump: in calls that wait. What lies between two waits, the rank has computed or
slept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPUTE, WAIT = "compute", "wait"


class Span(NamedTuple):
    """A piece of a rank's time: it computes, or waits in a call."""

    kind: str
    start: float
    end: float
    call: str = ""
    ranks: Sequence[int] = ()
    """Of a wait in a group: all of it."""


class RunTransfer(NamedTuple):
    """Bytes in flight, from when all ends were ready.

    Attributes:
        kind: "message", or the name of a collective.
        ranks: source and target of a message, all ranks of a collective.
        nbytes: of the message; of a collective the whole tensor, as torch counts it.
    """

    kind: str
    ranks: Sequence[int]
    nbytes: int
    start: float
    end: float


class LinkUse(NamedTuple):
    """What crossed a link: bytes, and seconds in which something did."""

    bandwidth: float
    bytes: float
    busy: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left.

    Attributes:
        seconds: each rank's clock at its end.
        waits: of each rank, in their order.
        transfers: in the order of their ends.
        links: those that something crossed, by name.
    """

    seconds: Sequence[float]
    waits: Sequence[Sequence[Span]]
    transfers: Sequence[RunTransfer]
    links: dict[str, LinkUse]

    def spans(self, rank: int) -> Iterator[Span]:
        """All of a rank's time, in pieces without a gap."""
        clock = 0.0
        for wait in self.waits[rank]:
            if wait.start > clock:
                yield Span(COMPUTE, clock, wait.start)
            yield wait
            clock = wait.end
        if self.seconds[rank] > clock:
            yield Span(COMPUTE, clock, self.seconds[rank])

    def total(self, rank: int, kind: str) -> float:
        """Seconds of a rank in "compute" or in "wait"."""
        return sum(s.end - s.start for s in self.spans(rank) if s.kind == kind)

    @property
    def makespan(self) -> float:
        """The clock of the last rank."""
        return max(self.seconds)


class RunRecorder:
    """Keeps what the scheduler, works, messages and collectives tell it."""

    def __init__(self, size: int):
        self.waits: list[list[Span]] = [[] for _ in range(size)]
        self.transfers: list[RunTransfer] = []
        self._calls: dict[int, Any] = {}  # in which each rank has waited last

    def waited(self, rank: Any, since: float, call: Any) -> None:
        """A rank's clock has come from `since` to where it is, in a call."""
        if rank.clock <= since:
            return
        mine = self.waits[rank.number]
        if self._calls.get(rank.number) is call and mine[-1].end == since:  # it polls
            mine[-1] = mine[-1]._replace(end=rank.clock)
            return
        self._calls[rank.number] = call
        ranks = getattr(call, "ranks", ())
        mine.append(Span(WAIT, since, rank.clock, call.describe(), ranks))

    def message(self, send: Any, receive: Any, start: float, end: float) -> None:
        ends = send.rank.number, send.ranks[send.peer]
        nbytes = send.tensor.nbytes
        self.transfers.append(RunTransfer("message", ends, nbytes, start, end))

    def collective(
        self, work: Any, ranks: Sequence[int], start: float, end: float
    ) -> None:
        part = work.part
        self.transfers.append(RunTransfer(part.kind, ranks, part.nbytes, start, end))

    def record(self, seconds: Sequence[float], links: dict[str, LinkUse]) -> RunRecord:
        return RunRecord(list(seconds), self.waits, self.transfers, links)
