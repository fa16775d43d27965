"""The threads of a cluster's ranks: started, watched, stopped.

    main thread     starts them, gives the first one its turn, and looks up now and
                    then: has a rank run too long, was Ctrl-C pressed?
    a rank's        sleeps until its turn comes, runs its program, passes the turn on

Threads are stopped by an exception: those that sleep raise it when they wake, the one
that runs at its next line of Python. One that runs in C++ goes on until it returns.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence

from xtrain.cluster.scheduler import Rank, Scheduler
from xtrain.cluster.threads import Interrupts, Stopped, interrupt, stay_on_one_core
from xtrain.testing.call_stack import stack_of
from xtrain.testing.errors import RankReport, RankTimeout

LOOK_SECONDS = 0.2
STOP_SECONDS = 10.0
GRACE_SECONDS = 0.05  # to come to a call that raises, before it is interrupted


class RankThreads:
    """One thread for each rank of a scheduler.

    Args:
        limit: seconds of this machine that a rank may run without letting others.
    """

    def __init__(self, scheduler: Scheduler, limit: float):
        self.scheduler, self.limit = scheduler, limit
        self._failures = 0
        self._interrupting = threading.Lock()  # held where a thread is interrupted

    def run(
        self,
        programs: Sequence[Callable[[], None]],
        timeout: float | None,
        interrupts: Interrupts,
    ) -> RankTimeout | None:
        """Run all ranks; what to raise when they had to be stopped.

        Args:
            programs: what each of them does in its thread.
            timeout: seconds of this machine that all of it may take.
        """
        ranks, started = self.scheduler.ranks, []
        for rank, call in zip(ranks, programs, strict=True):
            rank.thread = threading.Thread(
                target=self._body, args=(rank, call), daemon=True,
                name=f"xtrain rank {rank.number}",
            )  # fmt: skip
        try:
            for rank in ranks:
                rank.thread.start()
                started.append(rank)
            self.scheduler.begin()
            overdue = self._watch(timeout, interrupts)
        except BaseException:
            self._stop(started)
            raise
        if self.scheduler.crash is not None:
            self._stop(ranks)
        elif overdue is None and not interrupts.held_back:
            for rank in ranks:
                rank.thread.join()
        return overdue

    def _watch(
        self, timeout: float | None, interrupts: Interrupts
    ) -> RankTimeout | None:
        begun = since = time.monotonic()
        turns = -1
        while not self.scheduler.ended.acquire(timeout=LOOK_SECONDS):
            if interrupts.held_back:
                self._stop(self.scheduler.ranks)
                return None
            now = time.monotonic()
            if self.scheduler.turns != turns:
                turns, since = self.scheduler.turns, now
            if now - since > self.limit:
                rank = self.scheduler.current.number
                return self._cut(
                    f"rank {rank} ran for {self.limit} s and let no other rank run"
                )
            if timeout is not None and now - begun > timeout:
                return self._cut(f"not finished after {timeout} s")
        return None

    def _cut(self, why: str) -> RankTimeout:
        """Stop all ranks; where each of them was."""
        frames, reports = sys._current_frames(), []
        for rank in self.scheduler.ranks:
            frame = frames.get(rank.thread.ident or 0)
            if rank.done or frame is None:
                reports.append(RankReport(rank.number, "returned"))
            else:
                stack = stack_of(frame)
                summary = stack.summary
                if rank.waits_for is not None:
                    summary = f"waiting in {rank.waits_for.describe()}"
                reports.append(
                    RankReport(rank.number, "waiting", summary, stack.frames)
                )
        first = reports[self.scheduler.ranks.index(self.scheduler.current)]
        self._stop(self.scheduler.ranks)
        return RankTimeout(why, reports, first)

    def _stop(self, ranks: list[Rank]) -> None:
        """End all threads, one after another.

        All raise as soon as they have the turn and come to a call. One that does not
        come to a call raises at its next line of Python: there it may be in a callback
        whose exceptions are lost, or in a handover, so it is interrupted until it ends.
        """
        for rank in ranks:
            rank.stop = Stopped()
        now = time.monotonic()
        end, since, last = now + STOP_SECONDS, now, None
        while alive := [rank for rank in ranks if rank.thread.is_alive()]:
            current = self.scheduler.current
            rank = current if current in alive else alive[0]
            if rank is not last:
                since, last = now, rank
            elif now - since > GRACE_SECONDS:
                with self._interrupting:
                    if not rank.done:
                        interrupt(rank.thread)
            if rank.turn.locked():
                rank.turn.release()
            time.sleep(0.001)
            now = time.monotonic()
            if now > end:
                return  # it runs in C++, where nothing of ours reaches it

    def _body(self, rank: Rank, program: Callable[[], None]) -> None:
        """A thread: whatever happens, its rank is done once and passes the turn on."""
        error = None
        while not rank.done:
            try:
                if error is None:
                    stay_on_one_core()
                    rank.turn.acquire()
                    program()
                with self._interrupting:
                    rank.done = True
                for _ in range(2):  # a Stopped on its way comes here at the latest
                    pass
            except BaseException as caught:
                error = error or caught
        if error is not None:
            self._failures += 1
            rank.error, rank.failed_as = error, self._failures
        if rank.stop is None:
            self.scheduler.finish(rank)
