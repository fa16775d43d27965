# mypy: disable-error-code="attr-defined,list-item,misc"
"""Ranks without threads: a rank is run until it needs a message that is not there.

    rank 0   runs, sends, waits       | runs again from its start, goes on, ends
    rank 1                 runs, sends, waits   | runs again ...

A browser has neither processes nor threads. So a rank that has to wait is given up, and
run again from its start when what it waits for has come: its calls find what they have
already got.

    Ranks(4).run(function, *args)
"""

import contextlib
import contextvars
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import serve
from torch.utils._python_dispatch import ACTIVE

from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words
from xtrain.practice.replay_attempts import Nothing, Parked, Rank, Work
from xtrain.practice.replay_calls import Call, Matching
from xtrain.practice.stopping import Printed, TooLong, deadline
from xtrain.testing.errors import RankReport, RankTimeout, from_reports


class Deadlock(RuntimeError):
    """No rank can go on."""


class PeerEnded(RuntimeError):
    """A rank waits for one that has raised."""


class UnfinishedWork(RuntimeError):
    """A work that was never waited for, or a message that was never received."""


class Ranks:
    """Some ranks, run in turn.

    Args:
        limit: seconds that a rank may run without a call.
        buffered: a send ends at once, as if it were copied into a buffer.

    Attributes:
        watch: called with each message when its ends have met.
        seen: called when a rank makes a call, and when it goes on after a wait.
        keeps: calls that have returned need not be made again.
    """

    def __init__(self, size: int, limit: float = 2.0, buffered: bool = False):
        self.size, self.limit, self.buffered = size, limit, buffered
        self.ranks = [Rank(number) for number in range(size)]
        self.current = self.ranks[0]
        self.matching = Matching(buffered, self.met)
        self.watch: Callable[[Call, Call], None] | None = None
        self.seen: Callable[[], None] | None = None
        self.keeps = True

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """`program(*args)` on every rank; what each returns.

        Raises RankError, as the virtual cluster does.
        """
        with serve(self):
            while ready := [r for r in self.ranks if not r.done and r.can_go()]:
                for rank in ready:
                    self.attempt(rank, program, args)
        self.stuck()
        if any(rank.error is not None for rank in self.ranks):
            reports = [report(rank) for rank in self.ranks]
            raise from_reports("the file", reports, None)
        left = self.matching.left()
        if left and not self.buffered:
            lines = [f"  rank {c.rank}: {c.words}" for c in left[:8]]
            found = "messages without their other end:\n" + "\n".join(lines)
            raise UnfinishedWork(found)
        return [rank.result for rank in self.ranks]

    def attempt(self, rank: Rank, program: Callable[..., Any], args: Any) -> None:
        """Run a rank until it ends, fails or has to wait."""
        self.current = rank
        rank.begin()
        ACTIVE.clear()
        who = f"rank {rank.number} let no other rank run for"
        with limited(self.limit, rank.printed, who, rank.number):
            try:
                context = contextvars.copy_context()  # what it sets is set for itself
                rank.result = context.run(program, *args)
                if rank.open:
                    lines = [f"  {work.call.words}" for work in rank.open[:8]]
                    raise UnfinishedWork("never waited for:\n" + "\n".join(lines))
                rank.done = rank.waits is None  # whatever it made of being given up
            except Parked:
                pass
            except (Exception, SystemExit) as error:
                rank.error, rank.done = error, True

    def stuck(self) -> None:
        """No rank can go on: those that wait fail, with whom they wait for."""
        waiting = [r.waits for r in self.ranks if r.waits is not None and not r.done]
        failed = next((r for r in self.ranks if r.error is not None), None)
        text = "" if failed is not None else deadlock(waiting)
        for call in waiting:
            error: Exception = Deadlock(text)
            if failed is not None:
                why = f"rank {failed.number} has raised {type(failed.error).__name__}"
                error = PeerEnded(f"{call.words}: {why}")
            self.ranks[call.rank].error = error

    def met(self, send: Call, receive: Call) -> None:
        if self.watch is not None:
            self.watch(send, receive)

    # -- what the stand-in's torch.distributed calls -----------------------------------

    def message(
        self, kind: str, tensor: Tensor, peer: int | None, tag: int, group: Any,
        line: int,
    ) -> Work:  # fmt: skip
        """Post a send to a global rank, or a receive from it (None: from any)."""
        rank, sends = self.current, kind == "send"
        if rank.over:
            return Nothing()
        rank.enter_phase()
        more = f", {'dst' if sends else 'src'}={'any' if peer is None else peer}"
        more += f", tag={tag}" * bool(tag)
        call, new = rank.call(kind, tensor, group, line, peer, more)
        if self.seen is not None:
            self.seen()
        if not sends and tensor.is_floating_point():
            tensor.write([float("nan")] * tensor.numel())
        given, taken = ([tensor], []) if sends else ([], [tensor])
        work = self.opened(call, given, taken)
        if new and sends:
            call.given = [tensor.values()]
            self.matching.send(call, (rank.number, peer, tag, group.name))
        elif new:
            self.matching.receive(call, (peer, rank.number, tag, group.name))
        return work

    def collective(
        self, name: str, group: Any, given: Sequence[Tensor], taken: Sequence[Tensor],
        signature: Any, combine: Callable[..., list[list[list[Any]]]], line: int,
        seconds: float = 1.0,
    ) -> Work:  # fmt: skip
        """Post this rank's part; `combine` gets all ranks' inputs, in group order."""
        rank = self.current
        if rank.over:
            return Nothing()
        rank.enter_phase()
        first = next(iter([*given, *taken]), None)
        call, new = rank.call(name, first, group, line)
        number = rank.counts[group.name] = rank.counts.get(group.name, 0) + 1
        if new:
            call.given = [tensor.values() for tensor in given]
            kind = name, signature
            self.matching.join(call, number, group, kind, combine, seconds)
        return self.opened(call, given, taken)

    def next_phase(self, group: Any) -> None:
        """A barrier of a check: what comes after it has clocks of its own.

        A rank goes on, and waits for the others only before its next call: what is
        computed until then is computed once.
        """
        rank = self.current
        if rank.over:
            return
        work = self.collective(
            "barrier", group, [], [], (), lambda given: [[] for _ in given], 0
        )
        rank.open.remove(work)
        rank.phase, rank.clock = work.call, 0.0

    def opened(
        self, call: Call, given: Sequence[Tensor], taken: Sequence[Tensor]
    ) -> Work:
        work = Work(self.go_on, call, given, taken)
        self.current.open.append(work)
        return work

    def go_on(self, work: Work) -> None:
        """Go on with what a call has brought; give the attempt up if it has not."""
        rank = self.current
        if rank.over or work not in rank.open:
            return
        rank.finish(work)
        if self.seen is not None:
            self.seen()


@contextlib.contextmanager
def limited(
    seconds: float, printed: Printed, who: str, rank: int = 0
) -> Iterator[None]:
    """Keep what is printed; RankTimeout, with where it was, of what runs longer."""
    try:
        with deadline(seconds), contextlib.redirect_stdout(printed):
            yield
    except TooLong as stopped:
        text = "".join(traceback.format_exception(stopped))
        found = RankReport(rank, "waiting", "running", text)
        raise RankTimeout(f"{who} {seconds} s", [found], found) from None


def report(rank: Rank) -> RankReport:
    """How a rank has ended."""
    if rank.error is None:
        return RankReport(rank.number, "returned")
    # One that waits for a rank that has failed is not the cause.
    late = isinstance(rank.error, PeerEnded)
    return RankReport(
        rank.number, "raised", str(rank.error), exception=rank.error, at=late
    )


def deadlock(waiting: Sequence[Call]) -> str:
    """Who waits for whom, and for such as have returned."""
    states = []
    for call in waiting:
        needs = tuple(Need(other) for other in call.missing)
        wait = Wait(call.rank, call.words, needs)
        states.append(RankWaits(call.rank, host=wait))
    circle = find_circle(states)
    if circle:
        return in_words(circle)
    here = {call.rank for call in waiting}
    lines = ["deadlock: no rank can run"]
    for call in waiting[:8]:
        over = [str(other) for other in call.missing if other not in here]
        why = f", but rank {', '.join(over)} has returned" if over else ""
        lines.append(f"  rank {call.rank}: {call.words}{why}")
    return "\n".join(lines)
