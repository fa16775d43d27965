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

`message_rounds` puts the ledgers of all ranks together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.comm.call_agreement import is_counted
from xtrain.comm.call_observer import tensors_of
from xtrain.comm.events import Event
from xtrain.comm.watched_work import WatchedWork
from xtrain.comm.wire_bytes import bytes_sent_since, tcp_bytes_sent

MAX_VALUES = 64  # a ledger that keeps values keeps at most this many per message


class CommLedger(TorchDispatchMode):
    """Context manager that counts and records this rank's communication.

    Args:
        values: keep the values of messages of up to 64 elements. Runs on small, telling
            inputs then show what each message carried.

    Attributes: `bytes_sent`, `bytes_received`, `messages` (sends), `events` (a list of
    `Event` in issue order), `wire_bytes` (bytes this process's TCP sockets sent while
    the ledger was open, the backend's headers included, TCP/IP headers and what TCP had
    retransmissions not; None except on Linux, which counts them).
    """

    def __init__(self, values: bool = False):
        super().__init__()
        self.keep_values = values
        self.events: list[Event] = []
        self._under_way: dict[int, WatchedWork] = {}  # messages, by number
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
        return bytes_sent_since(self._wire_start)

    def __enter__(self) -> Self:
        self._wire_start = tcp_bytes_sent()
        self._wire_end = None
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._wire_start is not None:
            self._wire_end = bytes_sent_since(self._wire_start)
        super().__exit__(*exc)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, torch's default, imports the compiler at the first call: one second.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace, event = func.namespace, None
        if namespace == "c10d" or namespace.startswith("_c10d_functional"):
            # An outer ledger gets its turn when the call below reaches its mode.
            event = self._record_call(func.name().split("::")[1].split(".")[0], args)
        if event is None:
            return func(*args, **(kwargs or {}))
        if event.kind == "collective":
            with _bytes_filled_in(self.events, _group_of(func, args)):
                return func(*args, **(kwargs or {}))
        return self._watched(event, func(*args, **(kwargs or {})))

    def _watched(self, event: Event, boxed: Any) -> Any:
        """The work of a message; when it was waited for, its event learns of it."""
        work: dist.Work | None = dist.Work.unbox(boxed)
        number = event.number

        def note() -> None:
            self._under_way.pop(number, None)
            if self.events[number : number + 1] == [event]:  # for the first time
                self.events[number] = replace(event, done=len(self.events))

        if work is None:  # of a call that is part of a batch
            return boxed
        # Kept here: torch's C++ holds a work without its Python half.
        self._under_way[number] = watched = WatchedWork(work, note)
        return watched.boxed()

    def _record_call(self, op: str, args: Any) -> Event | None:
        if op in ("wait_tensor", "_wrap_tensor_autograd"):  # these move nothing
            return None
        tensors = tensors_of(args)
        payload = sum(t.numel() * t.element_size() for t in tensors_of(args[0]))
        if op in ("send", "recv_"):
            peer = _global_rank(args[1], args[2])
            return self._add(op.rstrip("_"), op.rstrip("_"), peer, payload, tensors)
        if op == "recv_any_source_":
            return self._add("recv", "recv", None, payload, tensors)
        return self._add("collective", op.rstrip("_"), None, payload, tensors)

    def _add(
        self,
        kind: str,
        op: str,
        peer: int | None,
        payload: int,
        tensors: list[Tensor],
    ) -> Event | None:
        if not is_counted():
            return None
        values = None
        if self.keep_values and kind == "send":
            flat = torch.cat([t.detach().reshape(-1) for t in tensors])
            if flat.numel() <= MAX_VALUES:
                values = tuple(flat.tolist())
        nbytes = None if kind == "collective" else payload
        rank, number = dist.get_rank(), len(self.events)
        event = Event(rank, kind, op, peer, payload, nbytes, number, values=values)
        self.events.append(event)
        return event


@contextmanager
def _bytes_filled_in(events: list[Event], group: Any) -> Iterator[None]:
    """Have the last event get what the collectives issued in here send and receive.

    A backend of ours calls the functions in `on_collective_end` of its
    group when a collective that was issued meanwhile has ended.
    """
    listeners = getattr(group, "on_collective_end", None)
    if listeners is None:
        yield
        return
    place = len(events) - 1

    def settle(sent: int, received: int) -> None:
        event = events[place]  # several collectives may be parts of one event
        events[place] = replace(
            event,
            nbytes=(event.nbytes or 0) + sent,
            received=(event.received or 0) + received,
        )

    listeners.append(settle)
    try:
        yield
    finally:
        listeners.remove(settle)


def _group_of(func: Any, args: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return dist.distributed_c10d._resolve_process_group(given["group_name"])


def _global_rank(boxed_group: Any, group_rank: int) -> int:
    return dist.get_global_rank(dist.ProcessGroup.unbox(boxed_group), group_rank)
