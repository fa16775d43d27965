"""Ranks that can be killed: plain processes around one function, each watched."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import xtrain.backends
from tests.testing.processes import asleep
from xtrain.backends.progress import Progress
from xtrain.backends.rendezvous import Rendezvous
from xtrain.evidence import executed
from xtrain.testing.lifetime import die_with_parent


def named_segments() -> list[str]:
    """Files of a backend in shared memory, of any process on this host.

    A checkpoint's writer has one, and a test beside this one may write a checkpoint.
    """
    names = [name for name in os.listdir("/dev/shm") if "xtrain" in name]
    return [name for name in names if not name.startswith("xtrain-checkpoint-")]


_FORK = multiprocessing.get_context("fork")


@dataclass
class Rank:
    """A process and its messages: (time, word) pairs, the last one how it ended."""

    process: Any
    pipe: Connection
    said: list[tuple[float, Any]] = field(default_factory=list)

    def hear(self, seconds: float = 60.0) -> Any:
        """The next word of this rank; one that is silent shows where it is."""
        if not self.pipe.poll(seconds):
            self.kill(signal.SIGABRT)  # faulthandler writes every thread's stack
            self.process.join(5)
            raise AssertionError(f"silent; it said {self.said}")
        self.said.append(self.pipe.recv())
        return self.said[-1][1]

    def sleeps(self) -> bool:
        """Whether it waits for something, as in the call that follows its word."""
        return asleep(self.process.pid)

    def kill(self, how: int = signal.SIGKILL) -> float:
        """Signal the rank; the time."""
        os.kill(self.process.pid, how)
        return time.monotonic()

    @property
    def at(self) -> float:
        """When it said its last word."""
        return self.said[-1][0]


class Ranks:
    """`size` forked ranks, each running `body(say, *args)` in a default group.

    Without `join` it is `body(say, enter, rank, *args)`: it forms the group itself.
    A rank's last word is ("ended", value) or ("raised", type, message).
    """

    def __init__(
        self, backend: str, size: int, body: Callable[..., Any], *args: Any,
        timeout: float = 20.0, join: bool = True, environment: dict | None = None,
        linger: bool = True,
    ):  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self.store = Path(self._folder.name, "store")
        self.ranks = []
        self.backend, self.seen = backend, executed.current()
        watched = self.seen.symbols if self.seen else ()
        for rank in range(size):
            ours, theirs = _FORK.Pipe()
            settings = (timeout, join, environment, linger, watched, os.getpid())
            process = _FORK.Process(
                target=_main, daemon=True,
                args=(body, args, theirs, backend, str(self.store), rank, size,
                      *settings),
            )  # fmt: skip
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours))

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def hear(self, seconds: float = 60.0) -> list[Any]:
        """The next word of every rank."""
        return [rank.hear(seconds) for rank in self.ranks]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        if self.seen:
            for path in self.store.parent.glob("ran-*"):
                symbols = path.read_text().split()
                self.seen.on_ranks(symbols, self.backend, len(self.ranks))
        self._folder.cleanup()


def after_rendezvous(act) -> None:
    """Have this process call `act(addresses, group)` before it connects."""
    exchange = Rendezvous.exchange_addresses

    def spy(self, endpoint):
        addresses, group = exchange(self, endpoint)
        act(addresses, group)
        return addresses, group

    Rendezvous.exchange_addresses = spy


def only_in_a_wait(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
    """A signal handler that puts itself off until the signal finds a wait of ours."""

    def handle(number: int, frame: FrameType | None) -> None:
        below = frame
        while below is not None and below.f_code is not Progress.wait.__code__:
            below = below.f_back
        if below is not None:
            handler(number, frame)
        else:
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()

    return handle


def on(rank: int) -> bool:
    return dist.get_rank() == rank


def here(say: Callable[[Any], None]) -> None:
    """Every rank says that it is in the group; rank 1 does nothing more."""
    dist.barrier()
    say("here")
    if on(1):
        stay()


def stay() -> None:
    """Until it is killed: its exit tells no rank of a fault."""
    threading.Event().wait()


def _main(
    body, args, pipe, backend, store, rank, size, timeout, join, environment, linger,
    watched, parent,
):  # fmt: skip
    die_with_parent(parent)
    torch.set_num_threads(1)
    faulthandler.enable(sys.__stderr__)
    # A test run in a shell's background ignores Ctrl-C; its ranks must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment or {})
    xtrain.backends.register()

    def say(word: Any) -> None:
        pipe.send((time.monotonic(), word))

    def enter() -> None:
        dist.init_process_group(
            backend, store=dist.FileStore(store, size), rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip

    def last_word() -> tuple:
        try:
            if not join:
                return "ended", body(say, enter, rank, *args)
            enter()
            return "ended", body(say, *args)
        except BaseException as error:
            plain = isinstance(error, RuntimeError)
            kept = str(error) if plain else traceback.format_exc()
            return "raised", type(error).__name__, kept

    with executed.watching(watched) as seen:
        last = last_word()
    # What the rank has run counts for the test; a rank that is killed writes nothing.
    Path(store).with_name(f"ran-{rank}").write_text(" ".join(seen.places))
    say(last)
    if linger:
        stay()
