"""Who runs the callbacks of futures: threads of their own, in order of completion.

A callback is the user's code: it may take long, and it may call collectives and wait
for them. So it runs neither on the thread that moves the bytes nor under a lock.

    work ends -> its callback is queued -> a thread runs one callback after the other

If a callback runs for longer than LONG_SECONDS while others are queued, another thread
goes on with those: one of them may be what the first callback waits for.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

LONG_SECONDS = 0.002
CLOSE_SECONDS = 1.0  # that `close` gives callbacks to end


class Callbacks:
    """The callbacks of one group; the first one starts the first thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._running: list[float] = []  # when each running callback began
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def add(self, callback: Callable[[], None]) -> None:
        """Have a callback run soon; returns at once."""
        with self._changed:
            self._queue.append(callback)
            if self._idle:
                self._changed.notify()
            else:
                self._start_thread()

    def close(self) -> None:
        """End the threads when the queue is empty; leave those that take too long."""
        end = time.monotonic() + CLOSE_SECONDS
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name="xtrain-callbacks", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                callback = self._next()
                if callback is None:
                    self._threads.discard(threading.current_thread())
                    return
                began = time.monotonic()
                self._running.append(began)
                if self._queue and not self._idle:
                    self._start_thread()  # should this callback take long
            try:
                callback()
            except BaseException:
                log.exception("a callback of a future failed")
            with self._changed:
                self._running.remove(began)

    def _next(self) -> Callable[[], None] | None:
        """Wait for a callback's turn; None when there will be no more."""
        self._idle += 1
        try:
            while True:
                if self._queue:
                    long_at = max(self._running, default=0.0) + LONG_SECONDS
                    wait = long_at - time.monotonic()
                    if not self._running or wait <= 0:
                        return self._queue.popleft()
                    self._changed.wait(wait)
                elif self._closed:
                    return None
                else:
                    self._changed.wait()
        finally:
            self._idle -= 1
