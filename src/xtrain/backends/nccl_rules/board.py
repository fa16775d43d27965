"""Where ranks tell each other what holds them up, so that a circle of waits is found.

A rank that has waited for a while writes its state into the store of the job and reads
those of the others. Whoever finds a circle leaves its words there, and every rank that
waits reads them and raises.
"""

import contextlib
import json
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed import Store

from xtrain.backends.nccl_rules.streams import Stream, StreamWork
from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words

LOOK_SECONDS = (
    0.25  # a wait that takes longer is told to the others, and again after it
)
PREFIX = "nccl-rules/"
CIRCLE = PREFIX + "circle"


class NcclDeadlock(RuntimeError):
    """Calls of NCCL that wait for each other: the text has a line for each rank."""


class WaitBoard:
    """The waits of one rank in all its groups, and those of the others.

    `streams` are those of all groups. `hosts` has the call that each thread waits in.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.callers: set[int] = set()  # threads that have made calls
        self.hosts: dict[int, StreamWork] = {}
        self._store: Store | None = None
        self._told = ""
        self._next_look = 0.0

    def state(self) -> RankWaits:
        """What holds up this rank now.

        With several threads that make calls it is not known which call a thread that
        runs on will make, so no wait of the program holds up what is not posted.
        """
        rank = dist.get_rank()
        state = RankWaits(rank)
        if len(self.callers) == 1 and self.hosts:
            (work,) = self.hosts.values()
            state.host = work.as_host_wait(rank)
        for stream in self.streams:
            stream.tell(state)
        return state

    def look(self) -> None:
        """Compare with the others' waits; NcclDeadlock if there is a circle."""
        now = time.monotonic()
        if now < self._next_look or not dist.is_initialized():
            return
        self._next_look = now + LOOK_SECONDS
        store = self.store()
        if store.check([CIRCLE]):
            raise NcclDeadlock(store.get(CIRCLE).decode())
        own = self.state()
        told = json.dumps(asdict(own))
        if told != self._told:
            store.set(f"{PREFIX}{own.rank}", told)
            self._told = told
        others = [r for r in range(dist.get_world_size()) if r != own.rank]
        keys = [key for r in others if store.check([key := f"{PREFIX}{r}"])]
        circle = find_circle([own, *(state_from(store.get(key)) for key in keys)])
        if circle:
            store.set(CIRCLE, in_words(circle))
            raise NcclDeadlock(in_words(circle))

    def store(self) -> Store:
        """The store of the job."""
        if self._store is None:
            # A connection of its own: the program may be waiting in the other one.
            self._store = dist.distributed_c10d._get_default_store().clone()
        return self._store

    def leave(self, streams: list[Stream]) -> None:
        """Forget the streams of a group that ends; with the last of them, all notes."""
        self.streams = [stream for stream in self.streams if stream not in streams]
        if not self.streams and self._store is not None:
            with contextlib.suppress(RuntimeError):  # its server may have ended
                self._store.delete_key(f"{PREFIX}{dist.get_rank()}")
                self._store.delete_key(CIRCLE)


BOARD: ContextVar[WaitBoard | None] = ContextVar(
    "xtrain_nccl_rules_board", default=None
)


def board_of_this_rank(make: Callable[[], WaitBoard] = WaitBoard) -> WaitBoard:
    """The board that all groups of this rank share; a new one after the last has gone."""
    board = BOARD.get()
    if board is None or not board.streams:
        board = make()
        BOARD.set(board)
    return board


def state_from(text: bytes) -> RankWaits:
    """A state, read back."""
    values = json.loads(text)
    queues = {name: wait_from(wait) for name, wait in values.pop("queues").items()}
    host = values.pop("host")
    return RankWaits(**values, queues=queues, host=wait_from(host) if host else None)


def wait_from(values: dict) -> Wait:
    needs = tuple(Need(**need) for need in values["needs"])
    return Wait(values["rank"], values["call"], needs)
