"""A thread beside a rank: it learns of a signal, and looks at the rank regularly.

    SIGUSR2 -> Python's handler in C -> pipe -> this thread -> on_signal
    every quarter of a second                -> this thread -> on_tick

A rank that waits inside C++ runs no Python handler on its main thread. Python's handler
in C runs at once and writes the signal's number to the wakeup pipe, from which this
thread reads. torch's waits release the interpreter lock, so the thread can run.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

TICK_SECONDS = 0.25
ASKS = getattr(signal, "SIGUSR2", None)  # Windows has none
END = b"\0"


class Watch:
    """Calls `on_signal` at a signal and `on_tick` regularly, from a thread of its own.

    Only the main thread of a process can take the signal: a recorder that starts on
    another one (a rank of a virtual cluster) goes without.
    """

    def __init__(
        self,
        on_signal: Callable[[], None],
        on_tick: Callable[[], None],
        number: int | None = ASKS,
    ):
        self._on_signal, self._on_tick, self._number = on_signal, on_tick, number
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._restore = contextlib.ExitStack()
        self._pass_on = -1  # a wakeup pipe that was there before
        if number and threading.current_thread() is threading.main_thread():
            self._take_signal(number)
        self._thread = threading.Thread(
            target=self._run, name=f"signal {number}", daemon=True
        )
        self._thread.start()

    def _take_signal(self, number: int) -> None:
        before = signal.getsignal(number)
        if not callable(before):  # a handler that is there stays
            signal.signal(number, lambda *_: None)
            default = signal.SIG_DFL if before is None else before
            self._restore.callback(signal.signal, number, default)
        self._pass_on = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, self._pass_on)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], TICK_SECONDS)
            received = os.read(self._read, 64) if ready else b""
            if END in received:
                return
            if received and self._pass_on >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._pass_on, received)
            if self._number and self._number in received:
                self._on_signal()
            self._on_tick()

    def stop(self) -> None:
        """Give the signal back and end the thread. Called where it was made."""
        self._restore.close()
        os.write(self._write, END)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, by its identifier; None if it has ended.

    Without collecting garbage: up to Python 3.11.8 a collection in this call can stop
    all threads for ever, when another thread starts or ends (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()
