"""Which rank runs next, and what time it is: one thread at a time.

    ranks that can run, by their clocks      things that happen, by their times
    (0.0, rank 3) (0.2, rank 0) ...          (0.1, a message arrives) ...
              \\                               /
               the least of all is next: no rank runs, and nothing happens,
               before everything earlier has been done

Every rank is a thread, and one of them runs at a time: the one whose turn it is. A rank
that has to wait picks the next one, passes the turn on and sleeps. So there is no data
race, no clock of the machine, and the same program gives the same order, bit
for bit. A seed draws another order among what is equally early.
"""

import itertools
import random
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from threading import get_ident
from typing import Any, Protocol

from xtrain.cluster.recorder import RunRecorder

POLL_SECONDS = 1e-6  # that it takes to ask whether a work has ended
PATIENT_POLLS = 10  # in a row; then a rank asks again when something has happened
IDLE_POLLS = 100  # of each rank while nothing happens: then they wait for nothing


class Waited(Protocol):
    """What a rank waits for."""

    def describe(self) -> str:
        """The call, as "recv([4] float32, src=1) at ring.py:12"."""

    def missing(self) -> list[int]:
        """The global ranks that have not come to it yet."""

    def fail(self, error: BaseException) -> None:
        """End it: its rank raises `error`."""


class Rank:
    """One rank: its clock, and what it waits for.

    Attributes:
        clock: its virtual seconds.
        waits_for: the call in which it sleeps; None while it can run.
        asks: the call that it last asked whether it has ended; None after other calls.
        idle: how often it has asked since something happened, and what came last.
        stop: raised in it as soon as it runs, and again whenever it would wait.
        state: what belongs to it alone, see `per_rank.RankState`.
    """

    __slots__ = (
        "asks", "clock", "done", "error", "failed_as", "idle", "number", "polls",
        "result", "state", "stop", "thread", "turn", "waits_for",
    )  # fmt: skip

    def __init__(self, number: int):
        self.number = number
        self.clock = 0.0
        self.polls = 0
        self.done = False
        self.waits_for: Waited | None = None
        self.asks: Waited | None = None
        self.idle = (0, 0)
        self.stop: BaseException | None = None
        self.error: BaseException | None = None
        self.failed_as = 0  # the how-manieth rank to fail
        self.result: Any = None
        self.state: Any = None
        self.thread = threading.Thread()  # until it gets its own
        self.turn = threading.Lock()  # held until its turn comes
        self.turn.acquire()

    @property
    def needs(self) -> Waited | None:
        """The call that it cannot go on without."""
        return self.waits_for or self.asks

    def goes_on(self) -> None:
        """It does something else than ask in a loop."""
        self.asks, self.polls = None, 0


class Scheduler:
    """Passes the turn from rank to rank.

    Args:
        seed: draws an order; None takes the first that came.
        swap: called with the rank that stops and the one that goes on.
        when_stuck: called when nothing can go on; whether a rank can after it.
        stand_ins: for each rank of the cluster the one of `ranks` that runs in its
            place, see `symmetry`.
        recorder: told where clocks jump and what is in flight; None keeps nothing.
    """

    def __init__(
        self,
        ranks: list[Rank],
        seed: int | None,
        swap: Callable[[Rank | None, Rank], None],
        when_stuck: Callable[[], bool],
        stand_ins: list[int],
        recorder: RunRecorder | None = None,
    ):
        self.ranks = ranks
        self.current = ranks[0]
        self.stand_ins, self.recorder = stand_ins, recorder
        self.turns = 0  # how often it has passed
        self.ended = threading.Semaphore(0)  # released when all ranks have
        self.crash: BaseException | None = None
        self.draw = None if seed is None else random.Random(seed)
        self._swap, self._when_stuck = swap, when_stuck
        self._count = itertools.count()
        self._happened = 0
        self._ready: list[tuple[float, float, int, Rank]] = []
        self._events: list[tuple[float, float, int, Callable[[], object]]] = []

    # -- what a rank calls -------------------------------------------------------------

    def block(self, call: Waited) -> None:
        """Sleep until another rank or an event calls `wake`."""
        rank = self.current
        if not self._in_thread_of(rank):
            raise RuntimeError(
                f"{call.describe()}: a thread that rank {rank.number} has started "
                "waits for other ranks, which run only while that rank waits itself"
            )
        if rank.stop is not None:
            raise rank.stop
        rank.goes_on()
        rank.waits_for = call
        self._happened += 1
        since = rank.clock
        self._switch(rank)
        if self.recorder is not None:
            self.recorder.waited(rank, since, call)

    def let_others_run(self) -> None:
        """Go on after all that is earlier than this rank's clock.

        A thread that a rank has started, as to ask the store with a deadline, goes on
        at once: it works in the time of its rank.
        """
        rank = self.current
        if not self._in_thread_of(rank):
            return
        self._make_ready(rank)
        self._switch(rank)

    def poll(self, call: Waited) -> None:
        """Time passes while a rank asks in a loop; others run, or it would not end."""
        rank = self.current
        if not self._in_thread_of(rank):
            return
        since = rank.clock
        rank.polls += 1
        rank.asks = call
        rank.clock += POLL_SECONDS
        if rank.polls > PATIENT_POLLS:
            upcoming = [queue[0][0] for queue in (self._ready, self._events) if queue]
            rank.clock = max(rank.clock, min(upcoming, default=0.0))
        if self.recorder is not None:
            self.recorder.waited(rank, since, call)
        times, moment = rank.idle
        rank.idle = times + 1 if moment == self._happened else 1, self._happened
        if self._all_ask_in_vain():
            self._when_stuck()
        self.let_others_run()

    def shake(self) -> None:
        """With a seed: now and then another rank goes first."""
        if self.draw is not None and self.draw.random() < 0.25:
            self.let_others_run()

    # -- what calls, events and the cluster call ---------------------------------------

    def wake(self, rank: Rank, time: float) -> None:
        """Let a rank that sleeps go on, at `time` or at its own later clock."""
        rank.waits_for = None
        rank.clock = max(rank.clock, time)
        self._make_ready(rank)

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Have something happen at a time."""
        self._happened += 1
        heappush(self._events, (time, self._tie(), next(self._count), action))

    def shaken(self, ended: Callable[[float], object]) -> Callable[[float], object]:
        """With a seed: what is to be told of an end is told later than it could be."""
        if self.draw is None:
            return ended
        return lambda end: self.at(end, lambda: ended(end))

    def begin(self) -> None:
        """Let the first rank run; called from outside."""
        for rank in self.ranks:
            self._make_ready(rank)
        self._hand_over(None, self._next())

    def finish(self, rank: Rank) -> None:
        """A rank has ended: others go on, or all have ended."""
        rank.goes_on()
        self._happened += 1
        self._hand_over(rank, self._next_or_crash())

    # ----------------------------------------------------------------------------------

    def _all_ask_in_vain(self) -> bool:
        """No rank does anything but wait, or ask again what it has asked so often."""
        enough = IDLE_POLLS, self._happened
        return (
            self.current.idle >= enough
            and not self._events
            and all(
                rank.done or rank.waits_for is not None
                or (rank.idle[1] == self._happened and rank.idle >= enough)
                for rank in self.ranks
            )
        )  # fmt: skip

    def _tie(self) -> float:
        return 0.0 if self.draw is None else self.draw.random()

    def _make_ready(self, rank: Rank) -> None:
        heappush(self._ready, (rank.clock, self._tie(), next(self._count), rank))

    def _next(self) -> Rank | None:
        ready, events = self._ready, self._events
        while True:
            if events and not (ready and ready[0][0] < events[0][0]):
                self._happened += 1
                heappop(events)[3]()
            elif ready:
                return heappop(ready)[3]
            elif not self._when_stuck():
                return None

    def _next_or_crash(self) -> Rank | None:
        """None, too, when an event has failed, which concerns all ranks."""
        try:
            return self._next()
        except Exception as error:
            self.crash = error
            return None

    def _in_thread_of(self, rank: Rank) -> bool:
        return get_ident() == rank.thread.ident

    def _switch(self, rank: Rank) -> None:
        following = self._next_or_crash()
        if following is not rank:
            self._hand_over(rank, following)
            rank.turn.acquire()
        if rank.stop is not None:
            raise rank.stop

    def _hand_over(self, rank: Rank | None, following: Rank | None) -> None:
        if following is None:
            self.ended.release()
            return
        self._swap(rank, following)
        self.current = following
        self.turns += 1
        following.turn.release()
