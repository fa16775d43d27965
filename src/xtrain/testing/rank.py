"""The life of one rank: join the group, then run what the parent sends.

    parent --- ("run", module, file, pickled (fn, args)) ---> rank
    parent <-- Outcome(value | exception, traceback) -------- rank
    parent --- ("reset",) when every rank has answered -----> rank
    parent --- ("exit",) -----------------------------------> rank

The reset waits for the parent's word because a rank that tears a group down while
its neighbours still use it breaks them.
"""

import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from xtrain.testing import state, transport


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank must know to join: its place, its group and its meeting point."""

    rank: int
    size: int
    backend: str
    device: str
    store: str
    stderr: str
    parent: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rank's answer to one message."""

    kind: str  # "ready", "returned" or "raised"
    value: bytes = b""
    error: bytes = b""
    summary: str = ""
    traceback: str = ""
    at: float = 0.0
    usable: bool = True


def rank_main(seat: Seat, jobs: Connection) -> None:
    """Body of a rank's process."""
    # Ctrl-C reaches the whole terminal group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stderr = os.open(seat.stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(stderr, 2)
    try:
        join(seat)
    except BaseException as error:
        jobs.send(failure(error))
        return
    clean = state.Clean(seat)
    clean.restore()
    jobs.send(Outcome("ready"))
    while True:
        message = jobs.recv()
        if message[0] == "exit":
            return
        if message[0] == "reset":
            clean.restore()
            continue
        jobs.send(answer(*message[1:], clean))


def join(seat: Seat) -> None:
    """Create the default process group of this rank."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.size),
        LOCAL_RANK=str(seat.rank),
        LOCAL_WORLD_SIZE=str(seat.size),
    )
    # Ranks of one machine need no name resolution and no outside interface.
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        seat.backend,
        store=dist.FileStore(seat.store, seat.size),
        rank=seat.rank,
        world_size=seat.size,
    )


def answer(module: str, file: str, call: bytes, clean: state.Clean) -> Outcome:
    """Run one job and say how it went."""
    try:
        transport.ensure_module(module, file)
        fn, args = pickle.loads(call)
        value = transport.dumps(fn(*args))
        return Outcome("returned", value=value, usable=clean.group_intact())
    except BaseException as error:
        return failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def failure(error: BaseException) -> Outcome:
    """Pack an exception so that the parent can raise it again."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Outcome(
        "raised",
        error=transport.dump_error(error),
        summary=summary,
        traceback="".join(traceback.format_exception(error)),
        at=time.monotonic(),
        usable=False,
    )
