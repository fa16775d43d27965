"""The calls of a group whose ranks are connected by sockets: who is in which.

A collective begins with a header to every other rank: the number of the call and its
fingerprint. So all ranks know that all are there and in the same call before data
moves. Small tensors are sent inline, right after the header. A rank that destroys the
group sends a last header, LEAVE.

Inside one host the connections are Unix sockets, across hosts TCP. Two for each pair,
one for collectives and one for messages, so that neither can hold the other up.
"""

import struct
from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import Store

from xtrain.backends.calls import compare
from xtrain.backends.connect import connect_all
from xtrain.backends.handshake import COLLECTIVES, MESSAGES
from xtrain.backends.messages import (
    MAX_MESSAGE_BYTES,
    Inbox,
    ProtocolError,
    raw,
    read_all,
    write_all,
)
from xtrain.backends.operation import Steps, interleave
from xtrain.backends.peers import Peers

CALL_HEADER = struct.Struct(
    "<QQQ"
)  # number of the call, fingerprint, bytes that follow
LEAVE = (1 << 64) - 1  # a call number: the sender leaves the group
INLINE_BYTES = 64 << 10  # up to here a tensor is sent right after the header


class SocketCalls:
    """This rank's connections to all others, and the headers of its calls.

    Args:
        store: where the ranks tell each other their addresses, and nothing secret.
        peers: watches the processes of the other ranks on this host.

    `sent` and `received` count the bytes of tensors that collectives moved; headers
    are not in them.
    """

    # What a rank sent before it died may still be on its way.
    DEATH_GRACE_SECONDS = 0.3

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, peers: Peers
    ):
        self.rank, self.size = rank, size
        self.calls = self.sent = self.received = 0
        self.in_call = False
        self.line_mismatch: list[int] = []  # all ranks' fingerprints of a call
        self._left: set[int] = set()
        self._arrived: set[int] = set()
        self._descriptions: dict[int, str] = {}
        self.others = [peer for peer in range(size) if peer != rank]
        connections = connect_all(store, rank, size, timeout, peers)
        self.collective = {peer: connections[peer, COLLECTIVES] for peer in self.others}
        self.outbox = {peer: connections[peer, MESSAGES] for peer in self.others}
        self.inbox = {
            peer: Inbox(peer, connections[peer, MESSAGES], MAX_MESSAGE_BYTES)
            for peer in self.others
        }

    # -- the header of a call ----------------------------------------------------------

    def exchange_headers(
        self, check: int, inline: dict[int, Tensor] | None = None
    ) -> Generator[None, None, dict[int, bytearray]]:
        """Send every rank the call's header, some a small tensor too; receive theirs.

        Returns the others' inline tensors as bytes, by rank. Raises CollectiveMismatch
        when a fingerprint differs in more than the line.
        """
        self.calls += 1
        self._arrived = set()
        headers: dict[int, tuple[int, bytearray]] = {}
        payloads = {peer: raw(tensor) for peer, tensor in (inline or {}).items()}
        sends = [
            self._send_header(peer, check, payloads.get(peer)) for peer in self.others
        ]
        receives = [self._receive_header(peer, headers) for peer in self.others]
        yield from interleave(sends + receives)
        if any(fingerprint != check for fingerprint, _ in headers.values()):
            checks = [headers.get(r, (check,))[0] for r in range(self.size)]
            self.line_mismatch = compare(checks)
        return {peer: data for peer, (_, data) in headers.items()}

    def _send_header(self, peer: int, check: int, payload: memoryview | None) -> Steps:
        nbytes = 0 if payload is None else payload.nbytes
        header = CALL_HEADER.pack(self.calls, check, nbytes)
        yield from write_all(self.collective[peer], memoryview(header))
        if payload is not None:
            self.sent += nbytes
            yield from write_all(self.collective[peer], payload)

    def _receive_header(
        self, peer: int, headers: dict[int, tuple[int, bytearray]]
    ) -> Steps:
        header = bytearray(CALL_HEADER.size)
        yield from read_all(self.collective[peer], memoryview(header))
        call, fingerprint, nbytes = CALL_HEADER.unpack(header)
        if call == LEAVE:
            self._left.add(peer)
        while peer in self._left:
            yield  # until the monitor of the peers raises
        if call != self.calls or nbytes > INLINE_BYTES:
            raise ProtocolError(
                f"rank {peer} sent the header of call {call} with {nbytes} bytes, "
                f"rank {self.rank} is in call {self.calls}"
            )
        data = bytearray(nbytes)
        self.received += nbytes
        yield from read_all(self.collective[peer], memoryview(data))
        headers[peer] = (fingerprint, data)
        self._arrived.add(peer)

    def describe(self, text: str) -> Steps:
        """Exchange descriptions of the calls in which the ranks disagree."""
        encoded = torch.frombuffer(bytearray(text.encode()[:4096]), dtype=torch.uint8)
        payloads = yield from self.exchange_headers(
            0, dict.fromkeys(self.others, encoded)
        )
        self._descriptions = {peer: data.decode() for peer, data in payloads.items()}

    def description(self, peer: int) -> str:
        return self._descriptions[peer]

    # -- who is there ------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The ranks that have not come to this rank's call."""
        return [peer for peer in self.others if peer not in self._arrived]

    def lost(self) -> list[int]:
        """The ranks whose connection ended without a LEAVE."""
        self._read_leaves()
        return [
            peer
            for peer in self.others
            if peer not in self._left and self.collective[peer].ended()
        ]

    def left(self) -> list[int]:
        """The ranks that have destroyed the group."""
        self._read_leaves()
        return sorted(self._left)

    def _read_leaves(self) -> None:
        if self.in_call:
            return  # what lies there may be data; `_receive_header` reads the headers
        for peer in self.others:
            head = self.collective[peer].peek(CALL_HEADER.size)
            if len(head) == CALL_HEADER.size and CALL_HEADER.unpack(head)[0] == LEAVE:
                self._left.add(peer)

    def close(self) -> None:
        """Send LEAVE and close all connections."""
        leave = memoryview(CALL_HEADER.pack(LEAVE, 0, 0))
        for connection in self.collective.values():
            connection.write(leave)
        for inbox in self.inbox.values():
            inbox.close()
        for connection in (*self.collective.values(), *self.outbox.values()):
            connection.close()
