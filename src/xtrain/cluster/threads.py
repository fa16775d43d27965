"""The threads of a cluster: kept on one core, stopped, and guarded against Ctrl-C."""

import contextlib
import ctypes
import gc
import os
import signal
import threading
from typing import Any

from xtrain.backends.calls import KINDS, PROGRAM

MANY_RANKS = 64  # from here on the collector would take a third of the time


class Stopped(BaseException):
    """Raised in ranks when the cluster is stopped: no handler of theirs catches it."""


def stay_on_one_core() -> None:
    """A turn passes three times faster between threads on one core."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def few_collections(size: int) -> Any:
    """Collect garbage less often: what a large cluster holds is looked at each time."""
    if size < MANY_RANKS:
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Interrupts:
    """Holds Ctrl-C back until all threads have ended and the process is as before."""

    def __init__(self) -> None:
        self.held_back = False
        self._handler: Any = None

    def __enter__(self) -> "Interrupts":
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handler = signal.signal(signal.SIGINT, self._hold_back)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self.held_back:
            raise KeyboardInterrupt

    def _hold_back(self, number: int, frame: Any) -> None:
        self.held_back = True


def interrupt(thread: threading.Thread) -> None:
    """Raise Stopped in a thread, at its next line of Python."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))


def line_of(frame: Any) -> str:
    """The innermost line of a program in a stack."""
    while frame is not None and KINDS[frame.f_globals.get("__name__", "")] != PROGRAM:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
