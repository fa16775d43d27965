# mypy: disable-error-code="override,assignment,misc"
"""A stream of calls that run one after another, and the works that wait for them.

A communicator has one stream: a group has one for its collectives and batches, and each
pair of ranks has one for unbatched messages. Waiting for a call of a stream makes the
results of all calls before it visible, as on a GPU.
"""

import sys
import threading
from collections import deque
from datetime import timedelta

import torch
from torch import Tensor

from xtrain.backends.nccl_rules.buffers import Buffers, overlapping
from xtrain.backends.nccl_rules.host_guard import GRACE_SECONDS, HostGuard
from xtrain.backends.nccl_rules.rules import broken
from xtrain.backends.observers import unobserved
from xtrain.backends.operation import Operation, Steps
from xtrain.backends.progress import Progress
from xtrain.backends.works import Handle, WorkFuture
from xtrain.comm.waits import Need, RankWaits, Wait

LOCK_SECONDS = 0.1


class CallStream:
    """The calls of one communicator of one rank that have not been waited for.

    Args:
        name: the same on all ranks, of no other communicator.
        members: its ranks in the default group.
        hosts: gets the call that a thread of the program waits in.
        guard: lets the program run past waits.
    """

    def __init__(
        self,
        name: str,
        members: list[int],
        progress: Progress,
        hosts: dict[int, "StreamWork"],
        guard: HostGuard,
    ):
        self.name, self.members, self.progress = name, members, progress
        self.hosts, self.guard = hosts, guard
        self.calls: deque[StreamWork] = deque()
        self.posted: dict[str, int] = {}
        self.started: dict[str, int] = {}

    def count(self, event: str) -> int:
        """Note that an event is posted here; its number."""
        self.posted[event] = self.posted.get(event, 0) + 1
        return self.posted[event]

    def writing(self, tensors: list[Tensor]) -> "StreamWork | None":
        """The last call in flight that is going to write to one of these tensors."""
        calls = list(self.calls)  # a thread of callbacks may take some out meanwhile
        found = [c for c in calls if overlapping(c.buffers.outputs, tensors)]
        return found[-1] if found else None

    def using(self, inputs: list[Tensor], outputs: list[Tensor]) -> "StreamWork | None":
        """A call in flight that uses what another writes, or writes what it uses."""
        for call in list(self.calls):
            theirs = call.buffers
            if overlapping(outputs, [*theirs.inputs, *theirs.outputs]):
                return call
            if overlapping(inputs, theirs.outputs):
                return call
        return None

    def tell(self, state: RankWaits) -> None:
        """Add this stream's first call to the state of this rank, then its counts.

        TimeoutError if its lock is not free: the thread that asks may hold another one.
        """
        if not self.progress.lock.acquire(timeout=LOCK_SECONDS):
            raise TimeoutError(self.name)
        try:
            first = next((c for c in self.calls if not c.operation.done), None)
            if first is not None:
                state.queues[self.name] = first.as_wait(state.rank)
            state.posted.update(self.posted)
            state.started.update(self.started)
        finally:
            self.progress.lock.release()


class StreamWork(Handle):
    """The work of one call of a stream.

    Args:
        events: what the call is at this rank, with numbers; they start together.
        needs: the events of other ranks that it cannot end without.
        number: of a call that all ranks of the stream make.
    """

    def __init__(
        self,
        stream: CallStream,
        buffers: Buffers,
        result: list[Tensor],
        events: dict[str, int],
        needs: tuple[Need, ...],
        number: int | None = None,
    ):
        super().__init__(result)
        self.stream, self.buffers = stream, buffers
        self.events, self.needs, self.number = events, needs, number
        self.operation: Operation

    def in_turn(self, steps: Steps) -> Steps:
        """Run the call's steps, from its turn on."""
        self.stream.started.update(self.events)
        with unobserved():
            self.buffers.begin()
        yield from steps

    def as_wait(self, rank: int) -> Wait:
        return Wait(rank, str(self.operation.call), self.needs)

    def as_host_wait(self, rank: int) -> Wait:
        """What the program waits for in it: its turn, or what it needs."""
        started = self.stream.started
        if any(started.get(event, 0) < n for event, n in self.events.items()):
            event, number = next(iter(self.events.items()))
            own_turn = Need(rank, self.stream.name, event, number)
            return Wait(rank, f"wait() for {self.operation.call}", (own_turn,))
        return self.as_wait(rank)

    # -- what torch asks ---------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order what the program computes after the call; see `host_guard`."""
        # torch's C++ (DDP's) looks at the results where no mode sees it: on a GPU it
        # stops there, here in this wait, which no Python function has called.
        from_python = "wait" in sys._getframe(1).f_code.co_names
        if timeout:
            self.wait_on_host(timeout.total_seconds())
        elif (
            self._ends_within(GRACE_SECONDS)
            or not from_python
            or not self.stream.guard.pass_by(self)
        ):
            self.wait_on_host()
        return True

    def wait_on_host(self, seconds: float = float("inf")) -> None:
        """Return when the call is over and its results are there; raise its error."""
        if not self._ends_within(seconds):
            raise RuntimeError(f"not done after {seconds:g} s: {self.operation.call}")
        if self.operation.error is not None:
            raise self.operation.error
        with unobserved():
            self._answer()

    def _ends_within(self, seconds: float) -> bool:
        """Stop the program until the call has ended, or for `seconds`."""
        thread, hosts = threading.get_ident(), self.stream.hosts
        hosts[thread] = self
        try:
            with unobserved():
                return self.stream.progress.ends_within(self.operation, seconds)
        finally:
            hosts.pop(thread, None)

    def is_completed(self) -> bool:
        if self.operation.done and self.operation.error is None:
            with unobserved():
                self._answer()
        return self.operation.done

    def is_success(self) -> bool:
        raise broken("success", self.operation.call, "is_success() was called")

    def exception(self) -> BaseException | None:
        return self.operation.error

    def get_future(self) -> torch.futures.Future:
        future = WorkFuture(self.stream.progress)

        def settle() -> None:
            try:
                if self.operation.error is not None:
                    raise self.operation.error
                with unobserved():
                    self._answer()
                future.set_result(self._result)
            except Exception as error:
                future.set_exception(error)

        self.stream.progress.when_ended(self.operation, settle)
        return future

    def deliver_at_end(self) -> None:
        """Fill the outputs at the end: a later call of the stream reads them."""
        with self.stream.progress.lock:
            if self.operation.done:
                self.buffers.deliver()
            else:
                self.operation.on_end.append(self.buffers.deliver)

    def _answer(self) -> None:
        """Give the program the results of this call and of those before it."""
        calls = self.stream.calls
        with self.stream.progress.lock:
            while self in calls:
                first = calls.popleft()
                tensor = first.buffers.overwritten()
                if tensor is not None:
                    values = f"a {tuple(tensor.shape)} tensor of it was written to"
                    raise broken("overwritten", first.operation.call, values)
                first.buffers.deliver()


class BatchPart(Handle):
    """What a message of a batch returns: false, as the batch has one work."""

    def __init__(self, result: list[Tensor]):
        super().__init__(result)
        self.batch: StreamWork | None = None

    def __bool__(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.batch is not None, "the batch is not complete"
        return self.batch.wait(timeout)

    def is_completed(self) -> bool:
        return self.batch is not None and self.batch.is_completed()
