"""CommLedger: what a block of code really sent, message by message.

Every torch.distributed call, ours included, passes torch's dispatcher as a `c10d`
operation, so a ledger is a dispatch mode that writes those calls down:

    with CommLedger() as ledger:
        ring_all_reduce(tensor)
    ledger.bytes_sent        # payload this rank sent, exact
    ledger.wire_bytes        # what its TCP sockets sent, the backend's headers included

Everything in `xtrain.comm` is built from send and receive, so its counts are exact. A
collective that a foreign backend runs inside C++ (gloo's own all_reduce) is one event
with its payload and `nbytes` None: what it sends shows only in `wire_bytes`.

`message_rounds` puts the ledgers of all ranks together and finds which messages can
travel at the same time: the number of rounds is the latency of the algorithm.
"""

import os
import socket
import struct
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.comm.rounds import COUNTERS, Round, paused

COUNTERS[:] = [Round]  # algorithms say what they issue together: count it
MAX_VALUES = 64  # a ledger that keeps values keeps at most this many per message


@dataclass(frozen=True, slots=True)
class Event:
    """One communication call as one rank saw it."""

    rank: int
    """Global rank that made the call."""
    kind: str
    """"send", "recv" or "collective"."""
    op: str
    """Name of the call: "send", "recv", or the collective's."""
    peer: int | None
    """Global rank at the other end; None for a collective and for receive-from-any."""
    payload: int
    """Bytes of the tensors handed to the call."""
    nbytes: int | None
    """Bytes this rank sent (for a receive: received) for it; None if only the backend
    knows."""
    round: int
    """Calls of one round were issued together, before any of them was waited for."""
    values: tuple[float, ...] | None = None
    """The values sent, where the ledger keeps them."""
    received: int | None = None
    """Bytes this rank received for a collective, where the backend tells."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a finished run, placed in time by `message_rounds`."""

    src: int
    dst: int
    nbytes: int
    round: int
    values: tuple[float, ...] | None = None


class CommLedger(TorchDispatchMode):
    """Context manager that counts and records this rank's communication.

    Args:
        values: keep the values of messages of up to 64 elements. Runs on small, telling
            inputs then show what each message carried.

    Attributes: `bytes_sent`, `bytes_received`, `messages` (sends), `events` (a list of
    `Event` in issue order), `wire_bytes` (bytes this process's TCP sockets sent while
    the ledger was open, the backend's headers included, TCP/IP headers and what TCP had
    to send again not; None where the system does not tell: everywhere but Linux).
    """

    _open: ClassVar[list["CommLedger"]] = []
    _dispatching = 0

    def __init__(self, values: bool = False):
        super().__init__()
        self.keep_values = values
        self.events: list[Event] = []
        self._wire_start: dict[int, int] | None = None
        self._wire_end: int | None = None

    @property
    def bytes_sent(self) -> int:
        return sum(e.nbytes or 0 for e in self.events if e.kind != "recv")

    @property
    def bytes_received(self) -> int:
        received = (e.nbytes if e.kind == "recv" else e.received for e in self.events)
        return sum(nbytes or 0 for nbytes in received)

    @property
    def messages(self) -> int:
        return sum(e.kind == "send" for e in self.events)

    @property
    def wire_bytes(self) -> int | None:
        if self._wire_end is not None or self._wire_start is None:
            return self._wire_end
        return _sent_since(self._wire_start)

    def __enter__(self) -> Self:
        self._wire_start = _tcp_bytes_sent()
        self._wire_end = None
        CommLedger._open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        CommLedger._open.remove(self)
        if self._wire_start is not None:
            self._wire_end = _sent_since(self._wire_start)
        super().__exit__(*exc)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, torch's default, imports the compiler at the first call: one second.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace = func.namespace
        if namespace == "c10d" or namespace.startswith("_c10d_functional"):
            # An outer ledger gets its turn when the call below reaches its mode.
            self._record_call(func.name().split("::")[1].split(".")[0], args)
        CommLedger._dispatching += namespace != "aten"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            CommLedger._dispatching -= namespace != "aten"

    def _record_call(self, op: str, args: Any) -> None:
        if op in ("wait_tensor", "_wrap_tensor_autograd"):  # these move nothing
            return
        tensors = [t for arg in args for t in _tensors(arg)]
        payload = sum(t.numel() * t.element_size() for t in _tensors(args[0]))
        if op == "send":
            self._add("send", "send", _global_rank(args[1], args[2]), payload, tensors)
        elif op == "recv_":
            self._add("recv", "recv", _global_rank(args[1], args[2]), payload, tensors)
        elif op == "recv_any_source_":
            self._add("recv", "recv", None, payload, tensors)
        else:
            self._add("collective", op.rstrip("_"), None, payload, tensors)

    def _add(
        self,
        kind: str,
        op: str,
        peer: int | None,
        payload: int,
        tensors: list[Tensor],
    ) -> None:
        if paused.depth:
            return
        with Round() as number:  # of its own, unless one is open
            pass
        values = None
        if self.keep_values and kind == "send":
            flat = torch.cat([t.detach().reshape(-1) for t in tensors])
            if flat.numel() <= MAX_VALUES:
                values = tuple(flat.tolist())
        nbytes = None if kind == "collective" else payload
        rank = dist.get_rank()
        event = Event(rank, kind, op, peer, payload, nbytes, number, values)
        self.events.append(event)


def record(
    kind: str, op: str, peer: int | None, tensors: Sequence[Tensor]
) -> Callable[[int, int], None] | None:
    """Tell every open ledger of a call that does not pass torch's dispatcher.

    A `torch.distributed` backend written in Python calls this for each of its calls,
    and for a collective calls what it returns, when that has ended, with the bytes
    sent and received. Returns None when no ledger is open.
    """
    if not CommLedger._open or paused.depth:
        return None
    payload = sum(t.numel() * t.element_size() for t in tensors)
    places = []
    for ledger in CommLedger._open:
        if not CommLedger._dispatching:  # or the event is there already
            ledger._add(kind, op, peer, payload, list(tensors))
        places.append((ledger.events, len(ledger.events) - 1))

    def settle(sent: int, received: int) -> None:
        for events, place in places:  # several calls may be parts of one event
            event = events[place]
            events[place] = replace(
                event,
                nbytes=(event.nbytes or 0) + sent,
                received=(event.received or 0) + received,
            )

    return settle


def message_rounds(events: list[list[Event]]) -> list[list[Message]]:
    """Place the messages of all ranks in time: entry t holds those of round t.

    Args:
        events: `ledger.events` of every rank, in any order.

    A message travels once both its ends are free; an end is free when all messages of
    its earlier rounds have travelled. So a chain of hops takes as many rounds as it has
    hops, and what can run side by side shares a round. Raises ValueError when sends and
    receives do not pair up.
    """
    messages = _paired(events)
    waiting: dict[
        int, deque[list[int]]
    ] = {}  # rank -> its rounds, each a list of messages
    for rank in {end.rank for pair in messages for end in pair}:
        rounds = defaultdict(list)
        for index, pair in enumerate(messages):
            for end in pair:
                if end.rank == rank:
                    rounds[end.round].append(index)
        waiting[rank] = deque(rounds[number] for number in sorted(rounds))

    free = dict.fromkeys(waiting, 0)
    time: dict[int, int] = {}
    while len(time) < len(messages):
        now = {rank: rounds[0] for rank, rounds in waiting.items() if rounds}
        ready = [
            index
            for index, (send, receive) in enumerate(messages)
            if index not in time
            and index in now.get(send.rank, ())
            and index in now.get(receive.rank, ())
        ]
        if not ready:
            raise ValueError(
                "the recorded sends and receives wait for each other in a circle; "
                "calls that are issued together belong inside one_round()"
            )
        for index in ready:
            time[index] = max(free[end.rank] for end in messages[index])
        for rank, current in now.items():
            if all(index in time for index in current):
                free[rank] = 1 + max(time[index] for index in current)
                waiting[rank].popleft()

    timeline: list[list[Message]] = [
        [] for _ in range(1 + max(time.values(), default=-1))
    ]
    for index, (send, receive) in enumerate(messages):
        message = Message(
            send.rank, receive.rank, send.payload, time[index], send.values
        )
        timeline[time[index]].append(message)
    return timeline


def _paired(events: list[list[Event]]) -> list[tuple[Event, Event]]:
    """The k-th send from a to b belongs to the k-th receive at b from a."""
    queues: dict[Any, tuple[list, list]] = defaultdict(lambda: ([], []))
    for event in (event for one_rank in events for event in one_rank):
        if event.kind == "send":
            queues[event.rank, event.peer][0].append(event)
        elif event.kind == "recv":
            queues[event.peer, event.rank][1].append(event)
    pairs: list[tuple[Event, Event]] = []
    for (src, dst), (sends, receives) in queues.items():
        if len(sends) != len(receives):
            raise ValueError(
                f"{len(sends)} sends from rank {src} to rank {dst}, "
                f"but {len(receives)} receives"
            )
        pairs += zip(sends, receives, strict=True)
    return pairs


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [t for item in argument for t in _tensors(item)]
    return []


def _global_rank(boxed_group: Any, group_rank: int) -> int:
    return dist.get_global_rank(dist.ProcessGroup.unbox(boxed_group), group_rank)


def _tcp_bytes_sent() -> dict[int, int] | None:
    """Bytes sent so far by each TCP socket of this process, by inode; Linux only.

    On a busy machine TCP takes a late answer for a loss and sends a segment again:
    those bytes are no part of what the program sent.
    """
    if sys.platform != "linux":
        return None
    counts = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.stat(f"/proc/self/fd/{name}").st_ino
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    if len(info) >= 216:  # Linux 4.19 and newer
                        # tcpi_bytes_sent and, counted in it, tcpi_bytes_retrans
                        sent, again = struct.unpack_from("QQ", info, 200)
                        counts[inode] = sent - again
        except OSError:
            continue  # closed meanwhile, or not a TCP socket
    return counts


def _sent_since(start: dict[int, int]) -> int:
    now = _tcp_bytes_sent() or {}
    return sum(count - start.get(inode, 0) for inode, count in now.items())
