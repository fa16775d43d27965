"""Messages over a stream of bytes: framing, tags, and a place for the unexpected.

A frame is a header (tag, dtype, payload length, where the sender's call stands), then
the payload. The receiver reads a header first and knows all before it touches its
tensor: a message of another size or dtype than the receive asks for is refused, and
named.

A receive takes the first message with its tag; earlier ones with other tags wait in
memory. Nothing is ever unpickled.
"""

import struct
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from xtrain.backends.progress import Steps

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
HEADER = struct.Struct("<qIIQ")  # tag, dtype code, length of the site, payload bytes
MAX_SITE = 200  # bytes of "file:line", cut beyond


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return flat.view(-1).view(torch.uint8).numpy().data


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
        if written == 0:
            yield
        data = data[written:]


def read_all(stream: Stream, into: memoryview) -> Steps:
    """Fill all of `into`, yielding while the stream is empty."""
    while into.nbytes:
        count = stream.read(into)
        if count == 0:
            yield
        into = into[count:]


def send_message(
    stream: Stream, payload: memoryview, tag: int, dtype: int, site: str
) -> Steps:
    """Write one frame."""
    where = site.encode()[-MAX_SITE:]
    header = HEADER.pack(tag, dtype, len(where), payload.nbytes) + where
    yield from write_all(stream, memoryview(header))
    yield from write_all(stream, payload)


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
        max_bytes: refuse frames that announce more than this.
    """

    def __init__(self, peer: int, stream: Stream, max_bytes: int):
        self.peer, self._stream, self._max_bytes = peer, stream, max_bytes
        self.posted: deque[Receive] = deque()
        self._unexpected: list[tuple[int, int, str, bytearray]] = []
        self._reading = self._read_frames()

    def pump(self) -> None:
        """Move what has arrived; returns as soon as it would have to wait."""
        next(self._reading)

    def post(self, receive: Receive) -> None:
        for index, (tag, dtype, site, payload) in enumerate(self._unexpected):
            if tag == receive.tag:
                del self._unexpected[index]
                if self._accept(receive, dtype, site, len(payload)):
                    receive.into[:] = payload
                receive.done = True
                return
        self.posted.append(receive)

    def _read_frames(self) -> Steps:
        header = bytearray(HEADER.size)
        while True:
            yield from read_all(self._stream, memoryview(header))
            tag, dtype, site_length, nbytes = HEADER.unpack(header)
            if site_length > MAX_SITE or nbytes > self._max_bytes:
                raise RuntimeError(
                    f"rank {self.peer} announced a frame of {nbytes} bytes "
                    f"({site_length} its origin); the limit is {self._max_bytes}"
                )
            site = bytearray(site_length)
            yield from read_all(self._stream, memoryview(site))
            where = site.decode(errors="replace")
            receive = self._take(tag)
            if receive is None:
                payload = bytearray(nbytes)
                yield from read_all(self._stream, memoryview(payload))
                # A receive may have been posted while the payload came in.
                receive = self._take(tag)
                if receive is None:
                    self._unexpected.append((tag, dtype, where, payload))
                elif self._accept(receive, dtype, where, nbytes):
                    receive.into[:] = payload
            elif self._accept(receive, dtype, where, nbytes):
                yield from read_all(self._stream, receive.into)
            else:
                yield from read_all(self._stream, memoryview(bytearray(nbytes)))
            if receive is not None:
                receive.done = True

    def _take(self, tag: int) -> Receive | None:
        for receive in list(self.posted):
            if receive.source is not None:  # an any-source receive served elsewhere
                self.posted.remove(receive)
            elif receive.tag == tag:
                self.posted.remove(receive)
                receive.source = self.peer
                return receive
        return None

    def _accept(self, receive: Receive, dtype: int, site: str, nbytes: int) -> bool:
        receive.source = self.peer
        if (dtype, nbytes) == (receive.dtype, receive.into.nbytes):
            return True
        receive.error = (
            f"rank {self.peer} sent {describe(nbytes, dtype)} at {site}, but this "
            f"receive takes {describe(receive.into.nbytes, receive.dtype)}"
        )
        return False


def describe(nbytes: int, dtype: int) -> str:
    known = dtype < len(DTYPES)
    name = str(DTYPES[dtype]).removeprefix("torch.") if known else f"dtype {dtype}"
    return f"{nbytes} bytes of {name}"
