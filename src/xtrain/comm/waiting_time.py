"""How long this rank waits in communication.

    host   compute | all_reduce ....... | compute | wait() ... | compute
                     counted                        counted

Counted is the host's time in calls of a group and in `wait` of their works, so also the
transfer itself. On gloo and our backends the host stops there. On CUDA it goes on, and
the device waits: that is not counted.

Cost: about 3 microseconds of the processor for each call with its wait.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from xtrain.comm.call_observer import METHODS, CallObserver, own_observers


class WaitingTime(CallObserver):
    """A context manager; `seconds` grows while it is entered.

    Args:
        clock: seconds; that of a virtual cluster tells virtual ones.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds, self.clock = 0.0, clock
        self._waiting = False

    def observe(self, op: str, group: Any, args: Sequence[Any]) -> float:
        return self.clock()

    def returned(self, kept: float, work: Any) -> None:
        if not self._waiting:
            self.seconds += self.clock() - kept
        self.batch_returned(work)

    def batch_returned(self, work: Any) -> None:
        if work is not None:
            METHODS.wrap(type(work), "wait", _counted)

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """Call `wait`; one inside another counts once."""
        if self._waiting:
            return wait()
        self._waiting, begun = True, self.clock()
        try:
            return wait()
        finally:
            self._waiting = False
            self.seconds += self.clock() - begun


def _counted(wait: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        call = partial(wait, *args, **kwargs)
        for observer in own_observers():  # none inside a call, which counts as a whole
            if isinstance(observer, WaitingTime):
                return observer.waiting(call)
        return call()

    return counted
