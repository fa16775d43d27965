"""One child process that can be fed, asked for its stack, and ended.

The pool of a World and the runner of scripts both stand on it. The child runs
`body(spec, jobs)` after it tied itself to its parent, opened a process group of its
own, moved its stderr into a file that the parent reads, and started its watcher.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from xtrain.evidence import executed
from xtrain.testing import watcher
from xtrain.testing.call_stack import CallStack, other_thread, stack_of_fault
from xtrain.testing.files import SharedFile
from xtrain.testing.lifetime import describe_exit, die_with_parent

Body = Callable[[Any, Connection], None]


class RankProcess:
    """A running child: `jobs` is the pipe its body reads and writes."""

    def __init__(self, name: str, body: Body, spec: Any, fork: bool) -> None:
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._stderr = SharedFile("stderr")
        self.jobs, jobs = context.Pipe()
        self.control, control = context.Pipe()
        self._process = context.Process(
            target=_child,
            name=name,
            args=(body, spec, jobs, control, self._stderr.path, os.getpid()),
        )
        with warnings.catch_warnings():
            # Python 3.12 warns when a process with threads forks. The child touches
            # nothing that another thread may have held: no pool, no logging, no lock.
            # The text is matched because the child inherits this filter.
            warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
            self._process.start()
        jobs.close()
        control.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    @property
    def sentinel(self) -> int:
        """Something to wait on: ready when the process has ended."""
        return self._process.sentinel

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def death(self) -> tuple[str, str]:
        """How the process ended: one line, and what it wrote to stderr before."""
        self._process.join(1.0)
        how = describe_exit(self._process.exitcode)
        message, found, fault = self.take_stderr().partition("Fatal Python error")
        stack = stack_of_fault(fault) if found else None
        if stack is None:
            return how, message + found + fault
        shown = message + stack.frames + other_thread(fault)
        return f"{how}, {stack.summary}", shown

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal, None while running."""
        return self._process.exitcode

    def take_stderr(self) -> str:
        """What the child wrote to stderr since the last call."""
        return self._stderr.take()

    def kill(self) -> None:
        """End the process now, wherever it is, and all that it has forked."""
        # A rank that ended by itself may have left children: its group is still there.
        pid = self._process.pid
        assert pid, "group 0 would be our own"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()  # it may not have opened its group yet

    def close(self) -> None:
        """Wait for a process that ends, and release what was held for it."""
        self._process.join()
        self._process.close()
        for pipe in (self.jobs, self.control):
            pipe.close()
        self._stderr.close()


def stacks_of(
    processes: dict[int, RankProcess], timeout: float = 1.0
) -> dict[int, CallStack]:
    """The stacks of several children, by rank, from inside or else by signal."""
    control_pipes = {rank: (p.control, p.pid) for rank, p in processes.items()}
    answers = watcher.ask(control_pipes, timeout)
    for rank in processes.keys() - answers.keys():
        answers[rank] = _written_stack(processes[rank], timeout)
    return answers


def _written_stack(process: RankProcess, timeout: float) -> CallStack:
    text = ""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.alive:
        text += process.take_stderr()
        stack = stack_of_fault(text)
        if stack is not None:
            return stack
        time.sleep(0.01)
    return CallStack(text, "not answering, not even to a signal (stopped?)")


def _child(
    body: Body,
    spec: Any,
    jobs: Connection,
    control: Connection,
    path: str,
    parent: int,
) -> None:
    die_with_parent(parent)
    executed.forget()  # the parent may have forked in the middle of a watched test
    os.setpgid(0, 0)
    # Ctrl-C reaches the whole terminal group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stderr = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(stderr, 2)
    # The parent may have replaced these (pytest captures output); start anew.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    watcher.watch(control, parent, sys.stderr)
    body(spec, jobs)
