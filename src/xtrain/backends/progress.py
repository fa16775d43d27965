"""What moves the bytes: operations as generators, advanced by the threads that wait.

An operation is a generator that yields wherever it would have to wait. The thread that
waits for it advances it, and all the others of its group in turn, so a send that was
started long ago advances while a later all-reduce is waited for. If no thread waits, a
background thread advances what is pending, so work that was started and left alone
finishes too. Callbacks of futures run on threads of their own (`callbacks`).

    collectives of a group   one queue: they run one after the other, in issue order
    sends to one peer        one queue a peer: messages leave in issue order
    receives                 advanced together; each ends when its message is there
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from xtrain.backends.callbacks import Callbacks
from xtrain.backends.operation import Operation

POST_SECONDS = 0.003  # that `post` may take before it leaves work behind
# The same where ranks take all cores: work left behind gains nothing, there is no core
# to do it meanwhile, and it loses what is in the caches now.
CROWDED_POST_SECONDS = 0.05
IDLE_SECONDS = 0.001  # the background thread leaves waiting threads this long alone
PAUSE_SECONDS = 50e-6  # a sleep between two passes
SPIN_SECONDS = 0.02  # a wait that takes longer sleeps between its passes
SPIN_PASSES = 256  # on the short way, before a look at the clock and at the peers
CHECK_SECONDS = 0.002  # between two looks at the peers


class Progress:
    """The pending operations of one group.

    Args:
        check: called now and then with an operation that waits; raises when the wait
            cannot succeed (a peer died, the time is up).
        give_way: called between two looks at what is waited for.
    """

    def __init__(
        self,
        check: Callable[[Operation], None],
        give_way: Callable[[], object] = os.sched_yield,
    ):
        self._check, self._give_way = check, give_way
        self._queues: dict[Hashable, deque[Operation]] = {}
        self.lock = threading.RLock()
        # Set and cleared, like `_closed`, under the lock only: no wake-up gets lost.
        self._pending = threading.Event()
        self._last_pass = 0.0
        self._closed: BaseException | None = None
        self.callbacks = Callbacks()
        self._thread: threading.Thread | None = None

    def post(self, queue: Hashable, operation: Operation, seconds: float = 0) -> None:
        """Queue an operation and return; it goes on while others are waited for.

        Given some seconds for it, most operations end here, sooner than the background
        thread could take them over.
        """
        with self.lock:
            if not self._queues and not self._closed and operation.advance():
                return  # the short way
            self._append(queue, operation)
        while time.monotonic() < operation.started + seconds:
            self._give_way()
            with self.lock:
                self._advance_all()
            if operation.done:
                return
        if not self._pending.is_set() and not operation.done:
            self._wake_background()

    def enqueue(self, queue: Hashable, operation: Operation) -> None:
        """Queue an operation that its thread is going to wait for."""
        with self.lock:
            self._append(queue, operation)

    def run(self, queue: Hashable, operation: Operation) -> None:
        """Queue an operation, wait for it and raise what it raises."""
        with self.lock:
            self._append(queue, operation)
            self._advance_alone(operation)
        if not operation.done:
            self.wait(operation)
        elif operation.error is not None:
            raise operation.error

    def wait(self, operation: Operation, seconds: float = float("inf")) -> None:
        """Return when the operation has ended; raise what it raised.

        After `seconds` RuntimeError: the operation goes on, the group is not broken.
        """
        if not self.ends_within(operation, seconds):
            raise RuntimeError(f"not done after {seconds:g} s: {operation.call}")
        if operation.error is not None:
            raise operation.error

    def ends_within(self, operation: Operation, seconds: float) -> bool:
        """Wait until the operation has ended, well or not; False if it goes on."""
        with self.lock:
            self._advance_alone(operation)
        began = 0.0 if operation.done else time.monotonic()
        next_check = began + CHECK_SECONDS
        while not operation.done:
            with self.lock:
                self._advance_all()
                now = self._last_pass
                if now > next_check and not operation.done:
                    self._check_or_fail(operation)
                    next_check = now + CHECK_SECONDS
            if now - began > seconds and not operation.done:
                self._wake_background()
                return False
            if now - began < SPIN_SECONDS:
                self._give_way()
            else:
                time.sleep(PAUSE_SECONDS)
        return True

    def when_ended(self, operation: Operation, callback: Callable[[], None]) -> None:
        """Call back when the operation has ended, at once if it has already.

        Later it is one of the threads of `callbacks` that calls, under no lock.
        """
        with self.lock:
            if not operation.done:
                operation.on_end.append(lambda: self.callbacks.add(callback))
                return
        callback()

    def fail_all(self, error: BaseException) -> None:
        """End every pending operation with `error`."""
        with self.lock:
            pending = [op for queue in self._queues.values() for op in queue]
            self._queues.clear()
            for operation in pending:
                operation.fail(error)

    def close(self, error: BaseException) -> None:
        """Stop the background thread and end what is pending with `error`.

        What is posted from now on ends with `error`, too. Always returns: a callback
        that does not is left to itself.
        """
        with self.lock:
            self._closed = error
            self._pending.set()
            thread = self._thread
        # A signal handler may have come here from under the lock. The thread needs that
        # to end, so then it is not waited for.
        below = self.lock._is_owned()  # type: ignore[attr-defined]
        if thread not in (None, threading.current_thread()) and not below:
            thread.join()
        self.fail_all(error)
        self.callbacks.close()

    def _append(self, queue: Hashable, operation: Operation) -> None:
        if self._closed:
            operation.fail(self._closed)
        else:
            self._queues.setdefault(queue, deque()).append(operation)

    def _advance_alone(self, operation: Operation) -> None:
        """The short way: nothing else is pending, so nothing else is looked at."""
        if len(self._queues) != 1:
            return
        ((key, queue),) = self._queues.items()
        if len(queue) != 1 or queue[0] is not operation:
            return
        self._last_pass = time.monotonic()
        for _ in range(SPIN_PASSES):
            if operation.advance():
                self._take_out(key, queue, operation)
                return
            self._give_way()

    def _advance_all(self) -> None:
        self._last_pass = time.monotonic()
        for key, queue in list(self._queues.items()):
            while queue:
                first = queue[0]
                if not first.done and not first.advance():
                    break
                self._take_out(key, queue, first)

    def _take_out(
        self, key: Hashable, queue: deque[Operation], ended: Operation
    ) -> None:
        """Drop the ended first of a queue, and the queue with its last."""
        if queue and queue[0] is ended:  # or `fail_all` has been here before
            queue.popleft()
        if queue:
            queue[0].started = self._last_pass  # its turn begins
        elif self._queues.get(key) is queue:
            del self._queues[key]

    def _check_or_fail(self, operation: Operation) -> None:
        try:
            self._check(operation)
        except Exception as error:
            self._advance_all()  # what a peer did before it went may be enough
            if not operation.done:
                self.fail_all(error)

    def _wake_background(self) -> None:
        with self.lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_in_background, name="xtrain-progress", daemon=True
                )
                self._thread.start()
            self._pending.set()

    def _run_in_background(self) -> None:
        next_check = 0.0
        while True:
            self._pending.wait()
            waited_for = time.monotonic() - self._last_pass < IDLE_SECONDS
            if waited_for and not self._closed:
                time.sleep(IDLE_SECONDS)
                continue  # a thread waits, and advances everything
            with self.lock:
                if self._closed:
                    return
                self._advance_all()
                now, self._last_pass = self._last_pass, 0.0  # no one waited
                if now > next_check:
                    for first in [queue[0] for queue in self._queues.values()]:
                        if not first.done:
                            self._check_or_fail(first)
                    next_check = now + CHECK_SECONDS
                if not self._queues:
                    self._pending.clear()
            time.sleep(PAUSE_SECONDS)
