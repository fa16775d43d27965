"""Who moves the bytes: operations as generators, advanced by whoever waits.

An operation is a generator that yields wherever it would have to wait. The thread that
waits for it advances it, and all the others of its group in turn, so a send that was
started long ago gets on while a later all-reduce is waited for. If nobody waits, a
background thread advances what is pending, so work that was started and left alone
finishes too.

    collectives of a group   one queue: they run one after the other, in issue order
    sends to one peer        one queue a peer: messages leave in issue order
    receives                 advanced together; each ends when its message is there
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable

PATIENCE = 0.003  # seconds for which `post` itself waits before it leaves work behind
IDLE_SECONDS = 0.001  # the background thread leaves waiting threads this long alone
PAUSE_SECONDS = 50e-6  # its sleep between two passes
CHECK_EVERY = 64  # passes between two looks at the clock and at the peers

Steps = Generator[None, None, None]


class Operation:
    """One posted operation: `done` when its steps have ended, well or with `error`."""

    __slots__ = ("call", "done", "error", "on_end", "started", "steps")

    def __init__(self, call: str, steps: Steps):
        self.call = call
        self.steps = steps
        self.on_end: list[Callable[[], None]] = []
        self.started = time.monotonic()
        self.done = False
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Run to the next wait; True when the operation has ended."""
        try:
            next(self.steps)
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)
        return self.done

    def waited(self) -> float:
        """Seconds since it was posted."""
        return time.monotonic() - self.started

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.steps.close()
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.error, self.done = error, True
        for callback in self.on_end:
            callback()


class Progress:
    """The pending operations of one group.

    Args:
        check: called now and then with an operation that waits; raises when it waits in
            vain (a peer died, the time is up).
    """

    def __init__(self, check: Callable[[Operation], None]):
        self._check = check
        self._queues: dict[Hashable, deque[Operation]] = {}
        self._lock = threading.RLock()
        self._pending = threading.Event()
        self._last_pass = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def post(self, queue: Hashable, call: str, steps: Steps) -> Operation:
        """Queue an operation and return; it goes on while others are waited for.

        Most operations end within the patience of a few milliseconds, sooner than the
        background thread could take them over.
        """
        operation = Operation(call, steps)
        with self._lock:
            self._queues.setdefault(queue, deque()).append(operation)
        give_up = operation.started + PATIENCE
        while True:
            with self._lock:
                self._advance_all()
            if operation.done:
                return operation
            if self._last_pass > give_up:
                self._wake_background()
                return operation
            os.sched_yield()

    def run(self, queue: Hashable, call: str, steps: Steps) -> None:
        """Queue an operation, wait for it and raise what it raises."""
        operation = Operation(call, steps)
        with self._lock:
            if self._queues:
                self._queues.setdefault(queue, deque()).append(operation)
            else:  # nothing else to advance: the short way
                passes = 0
                while not operation.advance():
                    passes += 1
                    if passes % CHECK_EVERY == 0:
                        self._check_or_fail(operation)
                    os.sched_yield()
        self.wait(operation)

    def wait(self, operation: Operation) -> None:
        """Return when the operation has ended; raise what it raised."""
        passes = 0
        while not operation.done:
            with self._lock:
                self._advance_all()
                passes += 1
                if passes % CHECK_EVERY == 0 and not operation.done:
                    self._check_or_fail(operation)
            os.sched_yield()
        if operation.error is not None:
            raise operation.error

    def when_ended(self, operation: Operation, callback: Callable[[], None]) -> None:
        """Call back when the operation has ended, at once if it has already."""
        with self._lock:
            if not operation.done:
                operation.on_end.append(callback)
                return
        callback()

    def fail_all(self, error: BaseException) -> None:
        """End every pending operation with `error`."""
        with self._lock:
            for queue in self._queues.values():
                for operation in queue:
                    operation.fail(error)
            self._queues.clear()

    def close(self) -> None:
        """Stop the background thread; pending operations stay where they are."""
        self._closed = True
        self._pending.set()
        if self._thread is not None:
            self._thread.join()

    def _advance_all(self) -> None:
        self._last_pass = time.monotonic()
        for key, queue in list(self._queues.items()):
            while queue and (queue[0].done or queue[0].advance()):
                queue.popleft()
            if not queue:
                self._queues.pop(key, None)

    def _check_or_fail(self, operation: Operation) -> None:
        try:
            self._check(operation)
        except Exception as error:
            operation.fail(error)
            self.fail_all(error)

    def _wake_background(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_in_background, name="xtrain-progress", daemon=True
            )
            self._thread.start()
        self._pending.set()

    def _run_in_background(self) -> None:
        while True:
            self._pending.wait()
            if self._closed:
                return
            if time.monotonic() - self._last_pass < IDLE_SECONDS:
                time.sleep(IDLE_SECONDS)
                continue  # somebody is waiting, and advances everything
            while self._advance_in_background():
                time.sleep(PAUSE_SECONDS)

    def _advance_in_background(self) -> bool:
        """One pass for nobody in particular; True while something is left to do."""
        with self._lock:
            self._advance_all()
            self._last_pass = 0.0  # this was nobody waiting
            for operation in [queue[0] for queue in self._queues.values()]:
                if not operation.done:
                    self._check_or_fail(operation)
            if not self._queues:
                self._pending.clear()
            return bool(self._queues) and not self._closed
