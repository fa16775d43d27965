"""Calls of torch.distributed as they are matched, in virtual seconds.

    send      posted at 2 s   --+--   both end at max(2, 5) + 1 = 6 s
    receive   posted at 5 s   --+

    collective                        ends a second after its last rank has come

A message takes one second, whatever its size, as on `xtrain.cluster` with
`flat(1.0, ...)`. Sends wait for their receives, as gloo's do.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any


class MismatchedCollectives(RuntimeError):
    """Ranks of a group are in different collectives."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of one rank, which all its attempts share.

    Attributes:
        words: what it is, as "recv([4] float64, src=1) at <your file>:12".
        missing: the global ranks that it waits for.
        peer: the global rank of a message's other end; None: any, until it has come.
        given: the numbers of each input.
        end: when it has ended, in virtual seconds; None until that is known.
        payload: what it brings, for each output.
    """

    rank: int
    kind: str
    words: str
    line: int
    numbers: int
    dtype: str
    posted: float
    missing: list[int]
    peer: int | None = None
    given: list[list[Any]] = field(default_factory=list)
    end: float | None = None
    payload: list[list[Any]] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True)
class Meeting:
    """The k-th collective of a group."""

    calls: dict[int, Call] = field(default_factory=dict)
    signature: Any = None
    broken: bool = False


class Matching:
    """Calls that have been posted, and those without their other end.

    Args:
        buffered: a send ends at once, as if it were copied into a buffer.
        met: called with each message, its send and its receive, when they have met.
    """

    def __init__(self, buffered: bool, met: Callable[[Call, Call], None]):
        self.buffered, self.met = buffered, met
        self.waiting: dict[Any, deque[Call]] = {}
        self.any_source: dict[Any, deque[Call]] = {}
        self.meetings: dict[Any, Meeting] = {}

    def left(self) -> list[Call]:
        """Messages without their other end."""
        return [call for queue in self.waiting.values() for call in queue]

    def send(self, call: Call, key: Any) -> None:
        """Post a send; the key is (source, target, tag, group)."""
        if self.buffered:
            call.end = call.posted
        receives = self.waiting.get(("recv", *key)) or self.any_source.get(key[1:])
        if receives:
            self.match(call, receives.popleft())
        else:
            self.waiting.setdefault(("send", *key), deque()).append(call)

    def receive(self, call: Call, key: Any) -> None:
        """Post a receive; source None takes the send that was posted first."""
        if key[0] is not None:
            sends = self.waiting.get(("send", *key))
            queues, place = self.waiting, ("recv", *key)
        else:
            found = [
                queue for (kind, _, *to), queue in self.waiting.items()
                if kind == "send" and (*to,) == key[1:] and queue
            ]  # fmt: skip
            sends = min(found, key=lambda queue: queue[0].posted, default=None)
            queues, place = self.any_source, key[1:]
        if sends:
            self.match(sends.popleft(), call)
        else:
            queues.setdefault(place, deque()).append(call)

    def match(self, send: Call, receive: Call) -> None:
        """The two ends of a message have met."""
        if (send.numbers, send.dtype) != (receive.numbers, receive.dtype):
            text = f"{receive.words} is met by {send.words}"
            for call in (send, receive):
                call.error = RuntimeError(f"the two ends of a message differ: {text}")
            return
        receive.peer, receive.payload = send.rank, send.given
        receive.end = max(send.posted, receive.posted) + 1.0
        send.end = send.end if self.buffered else receive.end
        self.met(send, receive)

    def join(
        self, call: Call, number: int, group: Any, signature: Any,
        combine: Callable[..., list[list[list[Any]]]], seconds: float,
    ) -> None:  # fmt: skip
        """Post a rank's part of the `number`-th collective of a group."""
        meeting = self.meetings.setdefault((group.name, number), Meeting())
        calls = meeting.calls
        calls[call.rank] = call
        if meeting.broken or meeting.signature not in (None, signature):
            meeting.broken = True
            lines = [f"  rank {c.rank}: {c.words}" for c in calls.values()]
            text = "ranks are in different collectives:\n" + "\n".join(lines)
            for one in calls.values():
                one.error = MismatchedCollectives(text)
            return
        meeting.signature = signature
        for one in calls.values():
            one.missing = [r for r in group.ranks if r not in calls]
        if len(calls) < len(group.ranks):
            return
        found = combine([calls[r].given for r in group.ranks])
        end = max(c.posted for c in calls.values()) + seconds
        for r, payload in zip(group.ranks, found, strict=True):
            calls[r].payload, calls[r].end = payload, end
        if call.kind == "all_to_all_single":
            self.pieces(group, calls)

    def pieces(self, group: Any, calls: dict[int, Call]) -> None:
        """Tell of an all-to-all as of its messages."""
        for source in group.ranks:
            for place, target in enumerate(group.ranks):
                part = replace(calls[source], given=[calls[source].given[place]])
                if target != source and part.given[0]:
                    self.met(part, calls[target])
