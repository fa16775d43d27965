"""SIGTERM to any rank: all finish the step, save it, and end with status 143.
An error that one rank keeps until the end of the step: all end with it.

    rank 0: log not written --> flag --+
    rank 1: SIGTERM --> flag ----------+-- end of the step: MAX over all ranks
                |                              --> every rank saves, or raises
                +-- the ranks have not met after `grace` seconds --> rank 1 ends, 143

Engines send it when time is up or a node is taken away, and kill after a while (for
torchrun 30 s). The flags are compared once a step, so that all ranks save the same one.
A rank that waits for one that is gone never gets there, and runs no handler of Python
either: so a thread counts the seconds. Once the ranks have met, saving has no limit. A
second SIGTERM changes nothing: many engines signal torchrun and its ranks, and torchrun
signals them again.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

from xtrain.comm.agreement import largest_of, raise_everywhere
from xtrain.comm.call_observer import METHODS
from xtrain.comm.flight_recorder import FlightRecorder
from xtrain.comm.flight_recorder_watch import Watch
from xtrain.train.phases import Place

STATUS = 128 + signal.SIGTERM
"""What a process ends with that has saved and stopped early, or could not."""


class Stopping:
    """Whether a rank has been asked to stop; `wanted=False` leaves SIGTERM as it is.

    A context manager: while it is entered SIGTERM is noted. Threads other than the main
    one cannot have signals; they follow those ranks that can.

    Args:
        grace: seconds from SIGTERM to the end of the step that all ranks reach.
        place: named when this rank ends without the others.
    """

    def __init__(
        self, wanted: bool = True, grace: float = 25.0, place: Place | None = None
    ):
        self.wanted, self.asked, self.agreed = wanted, False, False
        self.grace, self.place = grace, place or Place()
        self._before: Any = None
        self._watch: Watch | None = None
        self._since: float | None = None

    def __enter__(self) -> Self:
        if self.wanted and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._watch = Watch(self._count, self._look, signal.SIGTERM)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.stop()
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True

    def everywhere(self, problem: str | None = None) -> bool:
        """Whether any rank was asked; every rank calls it.

        Args:
            problem: what went wrong on this rank alone.

        Raises:
            OSError: on every rank, naming the ranks that have a problem.
        """
        asked, wrong = largest_of([self.asked, problem is not None], None)
        if wrong:
            raise_everywhere(OSError, problem, None)
        self.agreed |= bool(asked)
        return bool(asked)

    # -- in the thread

    def _count(self) -> None:
        self._since = self._since or time.monotonic()

    def _look(self) -> None:
        if self._since is None or self.agreed:
            return
        if time.monotonic() - self._since > self.grace:
            self.end_at_once()

    def end_at_once(self) -> None:
        """End this process with its place, and with the flight recorder's file."""
        text = f"SIGTERM, and the ranks have not met in {self.grace:g} s"
        end_now(f"{self.place}: {text}", STATUS)


def end_now(text: str, status: int) -> None:
    """End this process from any thread; its flight recorder writes its file."""
    print(text, file=sys.stderr, flush=True)
    for observer in METHODS.of_process():
        if isinstance(observer, FlightRecorder):
            observer.dump(text)
    os._exit(status)
