"""Reduce gradients while backward computes, and wait for them when it ends.

    backward    ... layer 4 | layer 3 | layer 2 | layer 1 | end
    bucket 0           full -> issued ....... done
    bucket 1                         full -> issued ..... wait
    bucket 2                                       left -> issue, wait

A hook on each parameter runs when its gradient is complete. All ranks must issue the
same collectives in the same order, whatever order their gradients come in, so buckets
are issued strictly in order, those that are incomplete at the end of backward.

The messages are those of `reduce`, which issues a bucket's collective.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import Variable

from xtrain.comm.work import Work


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls the method as long as its object is alive.

    The garbage collector does not see a parameter's hooks: one that held a wrapper
    would keep it, its gradients and its process group alive.
    """
    alive = weakref.WeakMethod(method)
    return lambda *args: call(*args) if (call := alive()) else None


class Reducer:
    """Issue reductions in order during backward, wait for all of them at its end.

    Args:
        reduce: issues the reduction of a bucket.
        at_end: called when a backward is over; it has to call `finish`.
        in_flight: the most reductions under way at once; any number unless given.

    `buckets` are those that are reduced, in the order in which all ranks do it. Each
    has `parameters`, and in `waiting` those without a gradient in this backward yet.
    """

    def __init__(
        self,
        reduce: Callable[[Any], Work],
        at_end: Callable[[], None],
        in_flight: int | None = None,
    ):
        self._reduce, self._at_end, self._limit = reduce, at_end, in_flight
        self.buckets: list[Any] = []
        self._next = 0  # the bucket that leaves next
        self._in_flight: list[Work] = []
        self._callback: weakref.ref[Callable[[], None]] | None = None

    def enter_backward(self) -> bool:
        """Have `at_end` called when the backward under way is over.

        To be called by every hook; True in the first of each backward.
        """
        if self._callback is not None and self._callback() is not None:
            return False
        self._start_anew()

        def end_of_backward() -> None:
            self._callback = None
            self._at_end()

        # autograd alone holds the callback: a backward that fails drops it uncalled
        self._callback = weakref.ref(end_of_backward)
        Variable._execution_engine.queue_callback(end_of_backward)
        return True

    def issue_complete(self) -> None:
        """Issue every bucket that has all gradients, unless one before it has not."""
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._next += 1
            self.issue(self.buckets[self._next - 1])

    def issue(self, bucket: Any) -> None:
        """Begin to reduce a bucket; first end reductions beyond the limit."""
        self._in_flight.append(self._reduce(bucket))
        if self._limit is not None:
            self._wait(leave=self._limit)

    def finish(self) -> None:
        """Issue the buckets that are left, in order, and wait for all of them."""
        for bucket in self.buckets[self._next :]:
            self.issue(bucket)
        self._wait()
        self._start_anew()

    def _wait(self, leave: int = 0) -> None:
        while len(self._in_flight) > leave:
            self._in_flight.pop(0).wait()

    def _start_anew(self) -> None:
        self._next = 0
        for work in self._in_flight:  # of a backward that failed
            work.abandon()
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.waiting = set(bucket.parameters)
