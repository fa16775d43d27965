"""A run's folder, which several jobs may save to and read from at once.

    run/
      .lock                          held while names change, not while data is written
      latest                         checksum and name of the newest checkpoint
      step-00000020/                 published: complete, and never changed again
        index.json                   readers hold a shared lock on it
      .partial-step-00000030-<8>/    being written
        .lock                        its writer holds it; released when the writer dies
      .deleted-<8>/                  renamed before it is deleted, so that no name of
                                     a checkpoint ever stands for half of one

Names change under `.lock`: publishing, moving `latest` and taking away what was
replaced are one step for every other job. Taken away is only what no job holds: the
unfinished work of dead jobs, and checkpoints of the same step that were there before
this one was begun.

Where the file system refuses locks, a save deletes nothing but what it wrote itself,
and leftovers stay. Where it grants them to each host separately, another host's
unfinished save can be mistaken for that of a dead job: then that save fails with an
error. What is published is always complete.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.locks import LOCK, names_locked, open_file, take_lock

INDEX = "index.json"
NAME = r"step-\d{8,}(?:-[0-9a-f]{8})?"
POINTER = re.compile(rf"crc32:([0-9a-f]{{8}}) ({NAME})\n")
OLD_POINTER = re.compile(rf"({NAME})\s*")  # without a checksum
Identity = tuple[int, int]


@dataclass
class Partial:
    """A checkpoint that is being written, and the lock that its writer holds."""

    directory: Path
    path: Path
    final: Path
    lock: int | None
    replaces: dict[Path, Identity | None]  # the same step, there before this one

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def prepare(directory: Path, step: int) -> Partial:
    """Make the folder that a checkpoint is written to; delete what dead jobs left."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    path = directory / f".partial-{name}-{secrets.token_hex(4)}"
    with names_locked(directory) as alone:
        if alone:
            for leftover in directory.glob(".partial-*"):
                set_aside(leftover, LOCK)
            for leftover in directory.glob(".latest-*"):
                leftover.unlink(missing_ok=True)
        path.mkdir()
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT)
        take_lock(lock, fcntl.LOCK_EX)
        older = [p for p in directory.glob(f"{name}*") if is_step(p.name, step)]
        replaces = {p: identity(p) for p in older}
    delete_set_aside(directory)
    return Partial(directory, path, directory / name, lock, replaces)


def publish(partial: Partial, index: dict[str, Any]) -> Path:
    """Move a complete checkpoint to its place and let `latest` name it."""
    check_files(partial.path, index["files"])
    write_text(partial.path / INDEX, json.dumps(index, indent=1))
    sync_directory(partial.path)
    directory = partial.directory
    with names_locked(directory) as alone:
        partial.release()
        (partial.path / LOCK).unlink()
        final = move_to_place(partial.path, partial.final)
        pointer = directory / f".latest-{secrets.token_hex(4)}"
        write_text(pointer, pointer_to(final.name))
        os.replace(pointer, directory / "latest")
        sync_directory(directory)
        if alone:
            for older, known in partial.replaces.items():
                if known and identity(older) == known:  # not one that took its name
                    set_aside(older, INDEX)
    delete_set_aside(directory)
    return final


def discard(partial: Partial) -> None:
    """Delete a checkpoint that is not going to be published."""
    shutil.rmtree(partial.path, ignore_errors=True)
    partial.release()


def check_files(path: Path, files: dict[str, int]) -> None:
    """CheckpointError unless what the ranks have written is there, whole."""
    for name, nbytes in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else "no file"
        if found != nbytes:
            raise CheckpointError(
                f"{file}: {nbytes} bytes were written, {found} found. Do all ranks "
                "write to the same folder, and does another job delete there?"
            )


def move_to_place(path: Path, final: Path) -> Path:
    """Rename, to another name if the place is taken: a step may be saved again."""
    other = final.with_name(f"{final.name}-{path.name[-8:]}")
    try:
        final = other if final.exists() else final
        os.rename(path, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        final = other  # taken just now, where there are no locks
        os.rename(path, final)
    return final


# -- which checkpoint is the newest


def latest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint of a run; None when there is none.

    CheckpointError when the file `latest` cannot be read, or is damaged.
    """
    pointer = Path(directory) / "latest"
    try:
        descriptor = open_file(pointer)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from None
    with open(descriptor, "rb") as file:
        text = file.read(1000).decode("ascii", errors="replace")
    found = POINTER.fullmatch(text)
    if found and int(found[1], 16) == zlib.crc32(found[2].encode()):
        return Path(directory) / found[2]
    if (old := OLD_POINTER.fullmatch(text)) and is_old(Path(directory) / old[1]):
        return Path(directory) / old[1]
    raise CheckpointError(
        f"{pointer} is damaged: load one of {directory}/step-* by its own path"
    )


def is_old(path: Path) -> bool:
    """Whether a checkpoint is of format 1, when `latest` had no checksum."""
    try:
        with open(open_file(path / INDEX), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == 1


def pointer_to(name: str) -> str:
    return f"crc32:{zlib.crc32(name.encode()):08x} {name}\n"


def is_step(name: str, step: int) -> bool:
    """Whether a checkpoint of that name is one of that step."""
    return bool(re.fullmatch(rf"step-{step:08d}(-[0-9a-f]{{8}})?", name))


def identity(path: Path) -> Identity | None:
    """What no other folder of the same name has; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


# -- deleting


def set_aside(path: Path, lock: str) -> None:
    """Rename a folder that no job holds, for `delete_set_aside`."""
    descriptor = None
    try:
        with suppress(FileNotFoundError):  # its writer died before it made the lock
            descriptor = os.open(path / lock, os.O_RDWR)
        if descriptor is None or take_lock(descriptor, fcntl.LOCK_EX):
            os.rename(path, path.with_name(f".deleted-{secrets.token_hex(4)}"))
    except OSError:
        pass  # held by another job
    finally:
        if descriptor is not None:
            os.close(descriptor)


def delete_set_aside(directory: Path) -> None:
    for path in directory.glob(".deleted-*"):
        shutil.rmtree(path, ignore_errors=True)


# -- files


def sync_directory(path: Path) -> None:
    """Have the names in a directory on disk, not only the files' contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
