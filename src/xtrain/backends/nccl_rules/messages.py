"""Messages that need both ends: neither ends before the other has begun.

    sender    offer  -->             data -->
    receiver         <-- readiness

Offer and readiness describe both ends (tag, dtype, size, line), and both ranks compare
them: NCCL ignores tags and does not compare sizes.
"""

import struct
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xtrain.backends.arguments import host_view
from xtrain.backends.calls import CallSite, shape_of
from xtrain.backends.messages import (
    DTYPE_CODES,
    Receive,
    arrival,
    decoded,
    describe,
    encoded,
    raw,
    send_message,
)
from xtrain.backends.nccl_rules.rules import broken
from xtrain.backends.operation import Steps, interleave

DESCRIPTION = struct.Struct("<qIQ200s")  # tag, dtype, bytes, line
BYTES = 0  # the code of uint8
SEND, RECV, DATA, JOIN = range(4)
KINDS = 4  # a frame's tag is its kind plus this times the communicator
PAIR, GROUP = range(2)  # communicators of two ranks: their own, and their group's


@dataclass(frozen=True, slots=True)
class End:
    """One end of a message: its kind, SEND or RECV, and what was called.

    Args:
        tensor: what is moved, contiguous or dense; `working` holds its elements.
        peer: the other rank in the group, `name` that in the default group.
        tag: the program's.
    """

    kind: int
    tensor: Tensor
    peer: int
    name: int
    tag: int
    site: CallSite

    def __str__(self) -> str:
        call, key = ("send", "dst") if self.kind == SEND else ("recv", "src")
        tag = f", tag={self.tag}" if self.tag else ""
        return f"{call}({shape_of(self.tensor)}, {key}={self.name}{tag}) at {self.site}"


class Wire:
    """Frames to and from the other ranks of a group; frames to one rank do not mix."""

    def __init__(self, transport: Any):
        self._transport = transport
        self._lines: dict[int, deque[object]] = defaultdict(deque)

    def write(
        self, peer: int, data: memoryview, tag: int, dtype: int, site: object
    ) -> Steps:
        line, ticket = self._lines[peer], object()
        line.append(ticket)
        while line[0] is not ticket:
            yield
        yield from send_message(self._transport.outbox[peer], data, tag, dtype, site)
        line.popleft()

    def read(self, peer: int, into: memoryview, tag: int, dtype: int) -> Steps:
        receive = Receive(into, tag, dtype)
        yield from arrival(receive, [self._transport.inbox[peer]])
        if receive.error is not None:
            raise RuntimeError(receive.error)

    def join(self, peer: int, site: CallSite) -> Steps:
        """Return when the other rank is in this call, too."""
        yield from self.write(peer, memoryview(b""), JOIN, BYTES, site)
        yield from self.read(peer, memoryview(bytearray()), JOIN, BYTES)

    def message(self, end: End, communicator: int, working: Tensor) -> Steps:
        """One end of a message, whose elements are `working`'s."""
        working = host_view(working)
        base, code = KINDS * communicator, DTYPE_CODES[working.dtype]
        mine = DESCRIPTION.pack(end.tag, code, working.nbytes, encoded(end.site))
        yield from self.write(
            end.peer, memoryview(mine), base + end.kind, BYTES, end.site
        )
        theirs = memoryview(bytearray(DESCRIPTION.size))
        other_kind = RECV if end.kind == SEND else SEND
        yield from self.read(end.peer, theirs, base + other_kind, BYTES)
        compare_ends(end, *DESCRIPTION.unpack(theirs))
        if end.kind == SEND:
            data = raw(working)
            yield from self.write(end.peer, data, base + DATA, code, end.site)
        else:
            yield from self.read(end.peer, raw(working), base + DATA, code)

    def batch(self, ends: Iterable[End], me: int, working: list[Tensor]) -> Steps:
        """All messages of a batch, in any order; what goes to this rank is copied."""
        pairs = list(zip(ends, working, strict=True))
        own = [[w for e, w in pairs if e.peer == me and e.kind == k] for k in (0, 1)]
        for sent, received in zip(*own, strict=True):
            received.copy_(sent)
        yield from interleave(
            [self.message(end, GROUP, w) for end, w in pairs if end.peer != me]
        )


def compare_ends(end: End, tag: int, dtype: int, nbytes: int, site: bytes) -> None:
    """NcclRuleError, at both ends, if they do not describe one message."""
    other = "recv" if end.kind == SEND else "send"
    where = f"the other end, rank {end.name}'s {other} at {decoded(site)},"
    code, own_bytes = DTYPE_CODES[end.tensor.dtype], end.tensor.nbytes
    if tag != end.tag:
        raise broken("tags", end, f"{where} has tag {tag}")
    if (dtype, nbytes) != (code, own_bytes):
        raise broken("sizes", end, f"{where} has {describe(nbytes, dtype)}")
