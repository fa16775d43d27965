"""Messages between two ranks: a send and a receive that find each other.

    send (src 0, dst 1, tag 0)  -+
                                 +-> both are posted: bytes are copied, the network
    recv (src 0, dst 1, tag 0)  -+   tells when they have arrived

A send ends when its receive has what was sent (a rendezvous, as with NCCL). What one
rank sends another with one tag arrives in the order of the sends. A receive from any
source takes the earliest message that is there.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xtrain.backends.calls import shape_of
from xtrain.cluster.compute import unseen
from xtrain.cluster.scheduler import Scheduler
from xtrain.cluster.works import VirtualCall, VirtualWork

memmove = ctypes.PyDLL(None).memmove  # unseen by autograd, modes and the profiler
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None
SEND, RECV = "send", "recv"


class PostedMessage(VirtualCall):
    """One end of a message, in ranks of its group; `peer` is None for any source."""

    __slots__ = ("group", "kind", "peer", "site", "tag", "tensor")

    def __init__(
        self, scheduler: Scheduler, kind: str, tensor: Tensor, group: Any,
        peer: int | None, tag: int,
    ):  # fmt: skip
        super().__init__(scheduler)
        self.kind, self.tensor, self.group = kind, tensor, group
        self.peer, self.tag = peer, tag
        self.site: Any = None

    def describe(self) -> str:
        ranks, tag = self.group.ranks, f", tag={self.tag}" if self.tag else ""
        peer = "any" if self.peer is None else ranks[self.peer]
        which = "dst" if self.kind == SEND else "src"
        where = f" at {self.site}" if self.site else ""
        group = self.group.in_words()
        return (
            f"{self.kind}({shape_of(self.tensor)}, {which}={peer}{tag}{group}){where}"
        )

    @property
    def ranks(self) -> Sequence[int]:
        return self.group.ranks  # type: ignore[no-any-return]

    def missing(self) -> list[int]:
        ranks = self.group.ranks
        if self.peer is None:
            return [rank for rank in ranks if rank != self.rank.number]
        return [ranks[self.group.stand_ins[self.peer]]]

    # as a work of torch's, without being one, which would cost a microsecond
    def result(self) -> list[Tensor]:
        return [self.tensor]

    def source_rank(self) -> int:
        return -1 if self.peer is None else self.peer

    _source_rank = source_rank

    def boxed(self) -> Any:
        return VirtualWork(self, [self.tensor]).boxed()

    def get_future(self) -> torch.futures.Future:
        return VirtualWork(self, [self.tensor]).get_future()


class Mailbox:
    """The messages of one group that wait for their other end."""

    def __init__(
        self, scheduler: Scheduler, network: Any, ranks: list[int],
        stand_ins: list[int],
    ):  # fmt: skip
        self._scheduler, self._network, self._ranks = scheduler, network, ranks
        self._stand_ins = stand_ins
        self._waiting: dict[tuple[int, int, int], deque[PostedMessage]] = {}
        self._any: dict[tuple[int, int], deque[PostedMessage]] = {}

    def post_send(self, message: PostedMessage, rank: int) -> None:
        assert message.peer is not None
        key = self._key(rank, message.peer, message.tag)
        queue = self._waiting.get(key)
        if queue and first_is(RECV, queue):
            self._match(message, queue.popleft())
            return
        self._queue(key, message)
        if self._any and self._any.get(key[1:]):
            self._look_later(key[1:], message)

    def post_receive(self, message: PostedMessage, rank: int) -> None:
        if message.peer is None:
            place = (rank, message.tag)
            self._any.setdefault(place, deque()).append(message)
            self._look_later(place, message)
            return
        key = self._key(message.peer, rank, message.tag)
        queue = self._waiting.get(key)
        if queue and first_is(SEND, queue):
            self._match(queue.popleft(), message)
        else:
            self._queue(key, message)

    def left(self) -> list[PostedMessage]:
        """What has not found its other end."""
        queues = [*self._waiting.values(), *self._any.values()]
        return [m for queue in queues for m in queue if m.error is None]

    def _key(self, source: int, target: int, tag: int) -> tuple[int, int, int]:
        """Between ranks of which one stands for both, it is the rank's own: what it
        would be sent by its like it sends to another one of them itself."""
        like = self._stand_ins[source]
        if like == self._stand_ins[target]:
            return like, like, tag
        return source, target, tag

    def _queue(self, key: tuple[int, int, int], message: PostedMessage) -> None:
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = deque()
        queue.append(message)

    def _look_later(self, place: tuple[int, int], message: PostedMessage) -> None:
        """When all that is earlier has been done: who is first is not known before."""
        self._scheduler.at(message.posted, lambda: self._take_any(place))

    def _take_any(self, place: tuple[int, int]) -> None:
        waiting = self._any[place]
        queues = [
            queue
            for (_, *to), queue in self._waiting.items()
            if (*to,) == place and first_is(SEND, queue)
        ]
        if not first_is(RECV, waiting) or not queues:
            return
        draw = self._scheduler.draw
        queue = min(queues, key=lambda q: q[0].posted) if draw is None else (
            draw.choice(queues)
        )  # fmt: skip
        self._match(queue.popleft(), waiting.popleft())

    def _match(self, send: PostedMessage, receive: PostedMessage) -> None:
        source, target = send.tensor, receive.tensor
        if (
            source.dtype is not target.dtype
            or source.numel() != target.numel()
            or source.is_meta is not target.is_meta
        ):
            text = f"{receive.describe()} is met by {send.describe()}"
            for message in (send, receive):
                message.fail(RuntimeError(f"the two ends of a message differ: {text}"))
            return
        if send.rank is not receive.rank:
            receive.peer = self._ranks.index(send.rank.number)
        assert receive.peer is not None and send.peer is not None
        source_rank = self._ranks[receive.peer]
        draw, recorder = self._scheduler.draw, self._scheduler.recorder
        late = draw is not None and draw.random() < 0.5  # as late as is legal
        if not late:
            copy(send, receive)
        start = max(send.posted, receive.posted)

        def ended(end: float) -> None:
            if late:
                copy(send, receive)
            if recorder is not None:
                recorder.message(send, receive, start, end)
            send.finish(end)
            receive.finish(end)

        self._network.send(
            source_rank, receive.rank.number, source.nbytes,
            start, self._scheduler.shaken(ended),
        )  # fmt: skip


def first_is(kind: str, queue: deque[PostedMessage]) -> bool:
    """Whether messages of this kind wait in a queue; those that failed leave it."""
    while queue and queue[0].error is not None:
        queue.popleft()
    return bool(queue) and queue[0].kind is kind


def copy(send: PostedMessage, receive: PostedMessage) -> None:
    """Move the bytes of a message."""
    if send.checks is not None:
        send.checks.before_copy(send, receive)
    move_bytes(receive.tensor, send.tensor)
    if receive.checks is not None:
        receive.checks.after_copy(receive)


def move_bytes(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one dtype and size; on "meta" there is nothing to do."""
    if target.is_contiguous() and source.is_contiguous():
        if not (target.is_meta or source.is_meta):
            memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    elif not (target.is_meta or source.is_meta):
        with unseen():
            target.data.copy_(source.detach().reshape(target.shape))
