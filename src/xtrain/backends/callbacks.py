"""Who runs the callbacks of futures: threads of their own, in order of completion.

A callback is the user's code: it may take long, and it may call collectives and wait
for them. So it runs neither on the thread that moves the bytes nor under a lock.

    work ends -> its callback is queued -> a thread runs one callback after the other

If a callback waits for another future of the group, or takes longer than LONG_SECONDS,
another thread goes on with the queue: what the callback waits for may be in there.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

failures = logging.getLogger(__name__)

LONG_SECONDS = 0.05
CLOSE_SECONDS = 1.0  # that `close` gives callbacks to end


class Callbacks:
    """The callbacks of one group; the first one starts the first thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        # When each callback that others wait for began.
        self._running: dict[threading.Thread, float] = {}
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def add(self, callback: Callable[[], None]) -> None:
        """Have a callback run soon; returns at once."""
        with self._changed:
            self._queue.append(callback)
            self._call_thread()

    def step_aside(self) -> None:
        """The current callback, if this is one, is going to wait: others may run."""
        with self._changed:
            held = self._running.pop(threading.current_thread(), None)
            if held is not None and self._queue:
                self._call_thread()

    def close(self) -> None:
        """End the threads when the queue is empty; leave those that take too long."""
        end = time.monotonic() + CLOSE_SECONDS
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _call_thread(self) -> None:
        if self._idle:
            self._changed.notify()
            return
        thread = threading.Thread(
            target=self._run, name="xtrain-callbacks", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                callback = self._next()
                if callback is None:
                    self._threads.discard(me)
                    return
                self._running[me] = time.monotonic()
                if self._queue:
                    self._call_thread()  # should this callback take long
            try:
                callback()
            except BaseException:
                failures.exception("a callback of a future failed")
            with self._changed:
                self._running.pop(me, None)

    def _next(self) -> Callable[[], None] | None:
        """Wait for a callback's turn; None when there will be no more."""
        self._idle += 1
        try:
            while True:
                if self._queue:
                    began = max(self._running.values(), default=0.0)
                    wait = began + LONG_SECONDS - time.monotonic()
                    if not self._running or wait <= 0:
                        return self._queue.popleft()
                    self._changed.wait(wait)
                elif self._closed:
                    return None
                else:
                    self._changed.wait()
        finally:
            self._idle -= 1
