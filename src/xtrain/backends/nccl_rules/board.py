"""Where ranks tell each other what holds them up, so that a circle of waits is found.

A rank that has waited for a while writes its state into the store of the job and reads
those of the others. Whoever finds a circle leaves its words there, and every rank that
waits reads them and raises.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import Store

from xtrain.backends.nccl_rules.host_guard import HostGuard
from xtrain.backends.nccl_rules.rules import in_words as rule_in_words
from xtrain.backends.nccl_rules.streams import CallStream, StreamWork
from xtrain.backends.progress import Progress
from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words

LOOK_SECONDS = 0.25  # of waiting, before a rank tells the others, and between its looks
PREFIX = "nccl-rules/"
CIRCLE = PREFIX + "circle"


class NcclDeadlock(RuntimeError):
    """Calls of NCCL that wait for each other: the text has a line for each rank."""


class WaitBoard:
    """The waits of one rank in all its groups, and those of the others.

    `streams` are those of all groups. `hosts` has the call that each thread waits in.
    """

    def __init__(self) -> None:
        # A group that is used no more is freed with its streams; its counts remain.
        self.streams: WeakSet[CallStream] = WeakSet()
        self._counts: list[tuple[dict[str, int], dict[str, int]]] = []
        self.callers: set[int] = set()  # threads that have made calls
        self.hosts: dict[int, StreamWork] = {}
        self.guard = HostGuard()
        self._generations: Counter[str] = Counter()
        self._store: Store | None = None
        self._told = ""
        self._next_look = 0.0

    def state(self) -> RankWaits:
        """What holds up this rank now.

        With several threads that make calls it is not known which call a thread that
        runs on will make, so no wait of the program holds up what is not posted.
        """
        rank = dist.get_rank()
        # The host first: what it posts after this is in the counts.
        state = RankWaits(rank)
        waiting = list(self.hosts.values())
        if len(self.callers) == 1 and len(waiting) == 1:
            state.host = waiting[0].as_host_wait(rank)
        for stream in list(self.streams):
            stream.tell(state)
        for posted, started in list(self._counts):
            state.posted.update(posted)
            state.started.update(started)
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
        try:
            own = self.state()
        except TimeoutError:
            return  # another thread looks as well, and holds what this one needs
        told = json.dumps(asdict(own))
        if told != self._told:
            store.set(f"{PREFIX}{own.rank}", told)
            self._told = told
        others = [r for r in range(dist.get_world_size()) if r != own.rank]
        keys = [key for r in others if store.check([key := f"{PREFIX}{r}"])]
        circle = find_circle([own, *(state_from(store.get(key)) for key in keys)])
        if circle:
            text = "\n".join([in_words(circle), *rules_of(circle)])
            store.set(CIRCLE, text)
            raise NcclDeadlock(text)

    def store(self) -> Store:
        """The store of the job."""
        if self._store is None:
            # A connection of its own: the program may be waiting in the other one.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
        return self._store

    def add(self, name: str, members: list[int], progress: Progress) -> CallStream:
        """A new stream: its name is made unique, as torch uses names again."""
        self._generations[name] += 1
        name = f"{name} {self._generations[name]}"
        stream = CallStream(name, members, progress, self.hosts, self.guard)
        self.streams.add(stream)
        self._counts.append((stream.posted, stream.started))
        return stream

    def leave(self, streams: Iterable[CallStream]) -> None:
        """Forget the streams of a group that ends; with the last one, everything."""
        self.streams.difference_update(streams)
        if self.streams:
            return
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # its server may have ended
                self._store.delete_key(f"{PREFIX}{dist.get_rank()}")
                self._store.delete_key(CIRCLE)
        self._counts.clear()
        self._generations.clear()
        self._store, self._told = None, ""


BOARD: ContextVar[WaitBoard | None] = ContextVar(
    "xtrain_nccl_rules_board", default=None
)


def board_of_this_rank() -> WaitBoard:
    """The board that all groups of this rank share."""
    board = BOARD.get()
    if board is None:
        BOARD.set(board := WaitBoard())
    return board


def rules_of(circle: list[Wait]) -> list[str]:
    """The rules of the streams that hold the circle's calls up, in words."""
    names = {}
    for need in (need for wait in circle for need in wait.needs):
        pair, first = " pair " in need.queue, need.event.endswith("communicator")
        use = "first use" if pair else "group's first use"
        names[use if first else f"one queue a {'pair' if pair else 'group'}"] = True
    return [rule_in_words(name) for name in names]


def state_from(text: bytes) -> RankWaits:
    """A state, read back."""
    values = json.loads(text)
    queues = {name: wait_from(wait) for name, wait in values.pop("queues").items()}
    host = values.pop("host")
    return RankWaits(**values, queues=queues, host=wait_from(host) if host else None)


def wait_from(values: dict) -> Wait:
    needs = tuple(Need(**need) for need in values["needs"])
    return Wait(values["rank"], values["call"], needs)
