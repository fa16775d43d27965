"""A rank never outlives the process that started it.

On Linux the kernel kills the rank when its parent ends, even by kill -9. Elsewhere
the rank's watcher thread (see `watcher`) notices that it was adopted and leaves.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Tie this process to `parent`, the process id that started it.

    The kernel watches the thread that forked: a World started from a thread lives
    only as long as that thread.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if orphaned(parent):  # it may have ended before the line above
        os._exit(1)


def orphaned(parent: int) -> bool:
    """Whether `parent` has ended, so that another process adopted this one."""
    return os.getppid() != parent


def describe_exit(code: int | None) -> str:
    """Say in words how a process with this exit code ended."""
    if code is None:
        return "closed its pipe without ending"
    if code >= 0:
        return f"exited with code {code} in the middle of a run"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"died by {name}"
