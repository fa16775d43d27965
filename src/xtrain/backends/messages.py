"""Messages over a stream of bytes: framing, tags, and a buffer for the unexpected.

A frame is a header (tag, dtype, payload length, where the sender's call stands), then
the payload. Every header has the same length, so it is read at once. The receiver reads
it first and knows all before it touches its tensor: a message of another size or dtype
than the receive asks for is refused, and named.

A receive takes the first message with its tag; earlier ones with other tags wait in
memory. Nothing is ever unpickled.
"""

import ctypes
import logging
import os
import struct
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from xtrain.backends.operation import Steps

log = logging.getLogger(__name__)

# A dtype's number in a header is its place here.
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MAX_SITE = 200  # bytes of "file:line", cut beyond, filled up with zeros
HEADER = struct.Struct(f"<qIQ{MAX_SITE}s")  # tag, dtype code, payload bytes, site
MAX_MESSAGE_BYTES = int(os.environ.get("XTRAIN_MAX_MESSAGE_BYTES", 1 << 32))
JOINED_BYTES = 1 << 14  # up to here header and payload are written at once
SCRATCH_BYTES = 1 << 16  # what is dropped is read in pieces of this size
BLOCK_BYTES = 256 << 10  # reduced at a time: stays in a core's own cache


class ProtocolError(RuntimeError):
    """What a peer sent is not a frame: nothing after it can be understood."""


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which lives as long as they do.

    Not by way of `numpy()`, after which torch refuses to resize the storage: sharded
    training frees weights like that.
    """
    nbytes = flat.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    block = (ctypes.c_ubyte * nbytes).from_address(flat.data_ptr())
    block.tensor = flat  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


class Stream(Protocol):
    """One direction of an ordered, reliable connection; neither call ever waits."""

    def write(self, data: memoryview) -> int:
        """Take as many bytes as fit now; their number."""

    def read(self, into: memoryview) -> int:
        """Fill as much as is there now; the number of bytes."""


def write_all(stream: Stream, data: memoryview) -> Steps:
    """Write all of `data`, yielding while the stream is full."""
    while data.nbytes:
        written = stream.write(data)
        if written == data.nbytes:
            return
        if written == 0:
            yield
        data = data[written:]


def read_all(stream: Stream, into: memoryview) -> Steps:
    """Fill all of `into`, yielding while the stream is empty."""
    while into.nbytes:
        count = stream.read(into)
        if count == into.nbytes:
            return
        if count == 0:
            yield
        into = into[count:]


def send_message(
    stream: Stream, payload: memoryview, tag: int, dtype: int, site: object
) -> Steps:
    """Write one frame."""
    header = HEADER.pack(tag, dtype, payload.nbytes, encoded(site))
    if payload.nbytes <= JOINED_BYTES:
        yield from write_all(stream, memoryview(b"".join((header, payload))))
        return
    yield from write_all(stream, memoryview(header))
    yield from write_all(stream, payload)


@lru_cache(maxsize=4096)
def encoded(site: object) -> bytes:
    """The end of a site's text: a program sends from the same lines again and again."""
    return str(site).encode()[-MAX_SITE:]


def decoded(site: bytes) -> str:
    """The text again, for an error message."""
    return site.rstrip(b"\0").decode(errors="replace")


class Receive:
    """A posted receive: filled, or failed with `error`, when `done`."""

    __slots__ = ("done", "dtype", "error", "into", "source", "tag")

    def __init__(self, into: memoryview, tag: int, dtype: int):
        self.into, self.tag, self.dtype = into, tag, dtype
        self.source: int | None = None  # the peer whose message it has taken
        self.done = False
        self.error: str | None = None


class Inbox:
    """Messages from one peer, matched with posted receives.

    Args:
        peer: the peer's rank in the group.
        max_bytes: make no room for a longer message that no receive waits for.
    """

    def __init__(self, peer: int, stream: Stream, max_bytes: int):
        self.peer, self._stream, self._max_bytes = peer, stream, max_bytes
        self.posted: deque[Receive] = deque()
        self._unexpected: list[tuple[int, int, bytes, int, bytearray | None]] = []
        self._reading = self._read_frames()

    def pump(self) -> None:
        """Move what has arrived: up to the end of a wanted message, or a wait."""
        next(self._reading)

    def close(self) -> None:
        self._reading.close()
        self.posted.clear()

    def post(self, receive: Receive) -> None:
        """Serve a receive from what has come already, or remember it."""
        if receive.source is not None:
            return  # an any-source receive served elsewhere
        for index, (tag, dtype, site, nbytes, data) in enumerate(self._unexpected):
            if tag == receive.tag:
                del self._unexpected[index]
                if data is None:
                    sent = f"{describe(nbytes, dtype)} at {decoded(site)}"
                    receive.error = (
                        f"rank {self.peer} sent {sent} before this receive; "
                        f"over {self._max_bytes} that is dropped"
                    )
                elif self._accept(receive, dtype, site, nbytes):
                    receive.into[:] = data
                receive.done = True
                return
        self.posted.append(receive)

    def _read_frames(self) -> Steps:
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield from read_all(self._stream, header)
            tag, dtype, nbytes, site = HEADER.unpack(header)
            if dtype >= len(DTYPES):
                raise ProtocolError(f"rank {self.peer} sent bytes that are no message")
            receive = self._take(tag)
            if receive is not None:
                if self._accept(receive, dtype, site, nbytes):
                    yield from read_all(self._stream, receive.into)
                else:
                    yield from self._skip(nbytes)
                receive.done = True
                yield  # the receive that waits for it continues at once
                continue
            data = None
            if nbytes > self._max_bytes:
                log.warning(
                    "rank %d sent %d bytes that no receive waits for: dropped, "
                    "the limit is %d", self.peer, nbytes, self._max_bytes,
                )  # fmt: skip
                yield from self._skip(nbytes)
            else:
                data = bytearray(nbytes)
                yield from read_all(self._stream, memoryview(data))
            self._unexpected.append((tag, dtype, site, nbytes, data))
            receive = self._take(tag)  # posted while the payload came in
            if receive is not None:
                self.post(receive)

    def _skip(self, nbytes: int) -> Steps:
        scratch = memoryview(bytearray(min(nbytes, SCRATCH_BYTES)))
        while nbytes:
            piece = scratch[: min(nbytes, SCRATCH_BYTES)]
            yield from read_all(self._stream, piece)
            nbytes -= piece.nbytes

    def _take(self, tag: int) -> Receive | None:
        if self.posted and self.posted[0].tag == tag and self.posted[0].source is None:
            return self.posted.popleft()
        for receive in list(self.posted):
            if receive.source is not None:  # an any-source receive served elsewhere
                self.posted.remove(receive)
            elif receive.tag == tag:
                self.posted.remove(receive)
                return receive
        return None

    def _accept(self, receive: Receive, dtype: int, site: bytes, nbytes: int) -> bool:
        receive.source = self.peer
        if (dtype, nbytes) == (receive.dtype, receive.into.nbytes):
            return True
        receive.error = (
            f"rank {self.peer} sent {describe(nbytes, dtype)} at {decoded(site)}, but "
            f"this receive takes {describe(receive.into.nbytes, receive.dtype)}"
        )
        return False


def arrival(receive: Receive, inboxes: Sequence[Inbox]) -> Steps:
    """Wait until the message for a receive has come into one of the inboxes."""
    for inbox in inboxes:
        inbox.post(receive)
    while not receive.done:
        for inbox in inboxes:
            inbox.pump()
        if not receive.done:
            yield


def describe(nbytes: int, dtype: int) -> str:
    known = dtype < len(DTYPES)
    name = str(DTYPES[dtype]).removeprefix("torch.") if known else f"dtype {dtype}"
    return f"{nbytes} bytes of {name}"
