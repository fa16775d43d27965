"""Ask a rank for its Python stack, even while it hangs.

    parent --- "stack" ---> watcher thread of the rank --- CallStack ---> parent
    parent --- SIGUSR1 ---> faulthandler, in C ------- text in the stderr file

torch's waits release the interpreter lock, so a Python thread can look at the main
thread and read the arguments of its frames. A C call that keeps the lock silences
that thread; then the signal still gets the stack, without arguments.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TextIO

from xtrain.testing.call_stack import CallStack, stack_of
from xtrain.testing.lifetime import orphaned

# How often a rank looks whether its parent is still there, in seconds.
_LOOK = 1.0


def watch(control: Connection, parent: int, stderr: TextIO) -> None:
    """Rank side: answer the parent's questions from a thread and from a signal."""
    faulthandler.enable(stderr)  # a fatal signal leaves the Python stack there
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    main = threading.get_ident()

    def answer() -> None:
        while not orphaned(parent):
            if control.poll(_LOOK):
                control.recv()
                control.send(stack_of(sys._current_frames()[main]))
        os._exit(1)

    threading.Thread(target=answer, name="xtrain watcher", daemon=True).start()


def ask(
    ranks: Mapping[int, tuple[Connection, int]], timeout: float
) -> dict[int, CallStack]:
    """Parent side: the stacks of several ranks, each given as (control, pid).

    A rank that keeps silent for `timeout` seconds is sent SIGUSR1 and is missing
    from the answer: its stack then stands in its stderr file.
    """
    for control, _ in ranks.values():
        _try_send(control)
    deadline = time.monotonic() + timeout
    answers: dict[int, CallStack] = {}
    for rank, (control, pid) in ranks.items():
        try:
            if control.poll(max(0.0, deadline - time.monotonic())):
                answers[rank] = control.recv()
            else:
                os.kill(pid, signal.SIGUSR1)
        except (EOFError, OSError):
            continue  # it died in the meantime
    return answers


def _try_send(control: Connection) -> None:
    with contextlib.suppress(OSError):  # a dead rank: the process tells
        control.send("stack")
