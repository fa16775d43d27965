"""Write a checkpoint in processes of their own, while training goes on.

    training   step | copy | step | step | step | wait | copy | step
    writers               | files, checksums, fsync, publish |

Each rank starts one writer, and the writers are a gloo group of their own, so they call
`save_pieces` as the ranks would. A rank copies its pieces into a file in shared memory,
which its writer maps: the price of a save is that copy, and as much memory as this rank
holds of the checkpoint. The next save waits for the one before it.

A checkpoint appears when it is complete, as ever. A writer that is killed leaves the
one before untouched; `wait`, or the next save, raises on every rank.
"""

import contextlib
import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.pieces import Piece
from xtrain.comm.agreement import (
    place_in,
    raising_everywhere,
    value_of_rank_0,
    values_of_all,
)

ENDED = "the writer of rank"
ALIGNED = 64
"""Bytes: each tensor begins at a multiple of them."""


class BackgroundWriter:
    """In place of `save_pieces`: `save_checkpoint(..., write=writer)`.

    Every rank of a group makes one, and calls it and `wait` together with the others.

    Args:
        seconds: how long the writers wait for one another.
    """

    def __init__(self, group: ProcessGroup | None = None, seconds: float = 1800.0):
        self.group, self.seconds = group, seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.buffer: Tensor | None = None
        self.shared = (
            Path(shared_folder()) / f"xtrain-checkpoint-{secrets.token_hex(8)}"
        )
        self.under_way: int | None = None

    def __call__(
        self,
        directory: str | Path,
        step: int,
        pieces: list[Piece],
        extra: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> Path:
        """Copy the pieces and let the writers save them; where it will appear.

        CheckpointError on every rank if the save before it failed, OSError if there is
        no room for the copy.
        """
        self.wait()
        ended = self.process is None or self.process.poll() is not None
        if any(values_of_all(ended, self.group)):  # the others' group has lost it
            with raising_everywhere(CheckpointError, OSError, group=self.group):
                self._start()
        self._join(directory)
        with raising_everywhere(CheckpointError, OSError, group=self.group):
            places = self._copied(pieces)
        self._send(("save", str(directory), step, places, extra))
        self.under_way = step
        return Path(directory) / f"step-{step:08d}"

    def wait(self) -> None:
        """Until the last save is complete; CheckpointError on every rank if it failed.

        Without a save under way it does nothing.
        """
        if self.under_way is None:
            return
        step, self.under_way = self.under_way, None
        values_of_all(None, self.group)  # ranks that take turns have all sent
        problems = [p for p in values_of_all(self._reply(), self.group) if p]
        if not problems:
            return
        self.end()
        # A writer that was killed leaves the others with lost connections.
        ended = [problem for problem in problems if problem.startswith(ENDED)]
        what = f"step {step} was not saved: "
        raise CheckpointError(what + (ended or problems)[0].removeprefix(what))

    def close(self) -> None:
        """Wait, and end the writer. After an error it ends it at once."""
        try:
            self.wait()
        finally:
            self.end()

    def _start(self) -> None:
        """A process that waits for what it is to do."""
        self.end()
        program = "from xtrain.checkpoint.background import main; main()"
        command = [sys.executable, "-c", program, str(self.shared)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.joined = False

    def _join(self, directory: str | Path) -> None:
        """Let new writers meet, through a file beside the checkpoints."""
        with raising_everywhere(CheckpointError, OSError, group=self.group):
            Path(directory).mkdir(parents=True, exist_ok=True)
        name = value_of_rank_0(f".writers-{secrets.token_hex(4)}", self.group)
        rank, size = place_in(self.group)
        if not self.joined:
            place = str(Path(directory).resolve() / name)
            self._send(("join", place, rank, size, self.seconds))
            self.joined = True

    def _copied(self, pieces: list[Piece]) -> list[tuple[Any, ...]]:
        """The pieces in the buffer: name, shape, offset, size, dtype, first byte."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.data.nbytes // ALIGNED) * ALIGNED
        if self.buffer is None or len(self.buffer) < end:
            reserve(self.shared, end)
            self.buffer = mapped(self.shared, max(end, 1))
        places = []
        for piece, start in zip(pieces, starts, strict=True):
            data = piece.data.detach()
            view_of(self.buffer, start, data.shape, data.dtype).copy_(data)
            size = tuple(data.shape)
            about = piece.name, piece.shape, piece.offset, size, data.dtype, start
            places.append(about)
        return places

    def _send(self, message: Any) -> None:
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its reply is missing, too
            write_message(self.process.stdin, message)

    def _reply(self) -> str | None:
        """The error of this rank's writer, if there is one."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            code = self.process.wait()
            why = f"by signal {-code}" if code < 0 else f"with exit status {code}"
            return f"{ENDED} {place_in(self.group)[0]} ended {why}"
        found: str | None = json.loads(line)
        return found

    def end(self) -> None:
        """End the writer at once; what it has not published is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        self.shared.unlink(missing_ok=True)
        self.buffer = None


def shared_folder() -> str:
    """Where files are in memory, if there is such a place."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else tempfile.gettempdir()


def reserve(path: Path, nbytes: int) -> None:
    """OSError if there is no room: a write to a mapped file would end the process."""
    with open(path, "ab") as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)


def mapped(path: Path, nbytes: int) -> Tensor:
    """A file as uint8, which is made, or made larger."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def view_of(buffer: Tensor, start: int, size: Any, dtype: torch.dtype) -> Tensor:
    """The tensor of this size and dtype that begins at a byte of the buffer."""
    numel = torch.Size(size).numel()
    part = buffer[start : start + numel * dtype.itemsize]
    return part.view(dtype).view(size)


def write_message(pipe: Any, message: Any) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


# -- in the writer


def main() -> None:
    """Save what the rank sends, until its end of the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # engines send it to all processes
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    shared = Path(sys.argv[1])
    for kind, *values in messages(sys.stdin.buffer):
        if kind == "join":
            join(*values)
            continue
        error = saved(shared, *values)
        replies.write(json.dumps(error).encode() + b"\n")
        replies.flush()
    shared.unlink(missing_ok=True)  # the rank has ended, maybe by a signal
    os._exit(0)  # the other writers may have ended already


def messages(pipe: BinaryIO) -> Iterator[Any]:
    """What comes through a pipe, up to its end."""
    while True:
        try:
            yield pickle.load(pipe)
        except EOFError:
            return


def join(place: str, rank: int, size: int, seconds: float) -> None:
    """Meet the other writers in the file `place`."""
    store = dist.FileStore(place, size)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    dist.barrier()
    if rank == 0:
        Path(place).unlink(missing_ok=True)


def saved(
    shared: Path, directory: str, step: int, places: list[Any], extra: Any
) -> str | None:
    """Save the pieces in the buffer; the error, if there is one."""
    try:
        ends = [
            start + torch.Size(s).numel() * d.itemsize for *_, s, d, start in places
        ]
        buffer = mapped(shared, max([1, *ends]))
        pieces = [
            Piece(name, shape, offset, view_of(buffer, start, size, dtype))
            for name, shape, offset, size, dtype, start in places
        ]
        save_pieces(directory, step, pieces, extra)
    except (CheckpointError, OSError, RuntimeError) as error:
        return str(error)
    return None
