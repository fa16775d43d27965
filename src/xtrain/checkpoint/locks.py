"""Locks on files, which the system releases when their holder dies.

They are flock's. They hold across hosts where the file system carries them (NFS with
its lock service, Lustre mounted with flock). A file system may also refuse them, or
grant them to each host separately (nolock, local_lock, localflock): what a save does
then is described in `folder`.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xtrain.checkpoint.errors import CheckpointError, CheckpointReplaced

LOCK = ".lock"
PATIENCE = 60.0  # seconds for others' renames


@contextmanager
def names_locked(directory: Path) -> Iterator[bool]:
    """Hold the lock under which names change; False where files cannot be locked."""
    path, descriptor = directory / LOCK, None
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if descriptor is None:
        yield False
        return
    try:
        deadline = time.monotonic() + PATIENCE
        while (ours := take_lock(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() > deadline:
                raise CheckpointError(f"another job holds {path} for {PATIENCE:g} s")
            time.sleep(0.005)
        yield bool(ours)
    finally:
        with suppress(OSError):  # closing is not enough while a forked child has it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def take_lock(descriptor: int, how: int) -> bool | None:
    """Whether the lock is ours now; None where files cannot be locked."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def hold(index: Path) -> int:
    """Open an index; until it is closed, its checkpoint is not taken away."""
    try:
        descriptor = open_file(index)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{index.parent} is not a checkpoint: it has no {index.name}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    if take_lock(descriptor, fcntl.LOCK_SH) is False or not is_at(descriptor, index):
        os.close(descriptor)
        raise replaced(index.parent)
    return descriptor


def is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to the file that was opened there."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def replaced(path: Path) -> CheckpointReplaced:
    return CheckpointReplaced(
        f"{path} was deleted or replaced while it was read: load again"
    )


def open_file(path: Path) -> int:
    """Open for reading what must be a file; a pipe would be waited at."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return descriptor
