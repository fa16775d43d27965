"""The transport of ranks that are connected by sockets: every rank with every other.

A collective begins with a header to every other rank: the number of the call and its
fingerprint. So all ranks know that all are there and in the same call before data
moves. Small tensors are sent inline, right after the header; large ones run around a
ring (`ring_stream`) or along a chain.

Inside one host the connections are Unix sockets, across hosts TCP. Two for each pair,
one for collectives and one for messages, so that neither can hold the other up.
"""

import struct
from array import array
from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import CollectiveMismatch, compare
from xtrain.backends.connect import connect_all
from xtrain.backends.handshake import COLLECTIVES, MESSAGES
from xtrain.backends.liveness import Peers
from xtrain.backends.messages import (
    MAX_MESSAGE_BYTES,
    Inbox,
    ProtocolError,
    raw,
    read_all,
    write_all,
)
from xtrain.backends.progress import Steps
from xtrain.backends.ring_stream import RingStream
from xtrain.comm.reduce_op import reduce_into

CALL_HEADER = struct.Struct(
    "<QQQ"
)  # number of the call, fingerprint, bytes that follow
LEAVE = (1 << 64) - 1  # a call number: the sender leaves the group
INLINE_BYTES = 64 << 10  # up to here a tensor is sent right after the header


class Sockets:
    """The transport of one group; see the module's text.

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
            everyone = [headers.get(r, (check,))[0] for r in range(self.size)]
            self.line_mismatch = compare(everyone)
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
            yield  # in vain, as the next look at the peers will tell
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

    # -- collectives: flat contiguous tensors, `check` the call's fingerprint ----------

    def barrier(self, check: int) -> Steps:
        yield from self.exchange_headers(check)

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if flat.nbytes <= INLINE_BYTES:
            payloads = yield from self.exchange_headers(
                check, dict.fromkeys(self.others, flat)
            )
            mine = flat.clone()
            shares = [
                mine if rank == self.rank else typed(payloads[rank], flat.dtype)
                for rank in range(self.size)
            ]
            reduce_into(flat, shares, op)  # in rank order: all ranks get the same bits
            return
        yield from self.exchange_headers(check)
        chunks = list(flat.tensor_split(self.size))
        yield from self._ring(chunks, op, reduce=True, gather=True)

    def reduce(
        self, flat: Tensor, root: int, op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        copy = flat if self.rank == root else flat.clone()
        yield from self.all_reduce(copy, op, check)

    def reduce_scatter(
        self, output: Tensor, inputs: list[Tensor], op: ReduceOp.RedOpType, check: int
    ) -> Steps:
        yield from self.exchange_headers(check)
        chunks = [chunk.clone() for chunk in inputs]
        yield from self._ring(chunks, op, reduce=True, gather=False)
        output.copy_(chunks[self.rank])

    def all_gather(self, outputs: list[Tensor], input: Tensor, check: int) -> Steps:
        yield from self.exchange_headers(check)
        outputs[self.rank].copy_(input)
        yield from self._ring(outputs, ReduceOp.SUM, reduce=False, gather=True)

    def broadcast(self, flat: Tensor, root: int, check: int) -> Steps:
        if flat.nbytes > INLINE_BYTES:
            yield from self.exchange_headers(check)
            yield from self._chain(raw(flat), root)
            return
        inline = dict.fromkeys(self.others, flat) if self.rank == root else None
        payloads = yield from self.exchange_headers(check, inline)
        if self.rank != root:
            flat.copy_(typed(payloads[root], flat.dtype))

    def _chain(self, data: memoryview, root: int) -> Steps:
        """From the root to the right, each rank passing the beginning on at once."""
        hops = (self.rank - root) % self.size
        last = hops == self.size - 1
        have, sent = data.nbytes if hops == 0 else 0, 0
        self.received += data.nbytes - have
        self.sent += 0 if last else data.nbytes
        while have < data.nbytes or (sent < data.nbytes and not last):
            moved = 0
            if have < data.nbytes:
                left = self.collective[(self.rank - 1) % self.size]
                moved += left.read(data[have:])
                have += moved
            if sent < have and not last:
                right = self.collective[(self.rank + 1) % self.size]
                count = right.write(data[sent:have])
                sent, moved = sent + count, moved + count
            if not moved:
                yield

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        yield from self._agree_on_sizes(outputs, inputs, check)
        outputs[self.rank].copy_(inputs[self.rank])
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.sent += sum(inputs[peer].nbytes for peer in order)
        self.received += sum(outputs[peer].nbytes for peer in order)
        yield from interleave(
            [write_all(self.collective[peer], raw(inputs[peer])) for peer in order]
            + [read_all(self.collective[peer], raw(outputs[peer])) for peer in order]
        )

    def _agree_on_sizes(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        """CollectiveMismatch, on all ranks, when one expects what is not sent."""
        counts = array("q", [t.numel() for t in (*inputs, *outputs)])
        mine = torch.frombuffer(counts, dtype=torch.int64)
        before = self.sent, self.received
        payloads = yield from self.exchange_headers(
            check, dict.fromkeys(self.others, mine)
        )
        self.sent, self.received = before  # no tensor's bytes
        rows = [
            mine if rank == self.rank else typed(payloads[rank], torch.int64)
            for rank in range(self.size)
        ]
        sends, receives = torch.stack(rows).split(self.size, dim=1)
        if not torch.equal(sends, receives.T):
            raise CollectiveMismatch

    def _ring(
        self, chunks: list[Tensor], op: ReduceOp.RedOpType, reduce: bool, gather: bool
    ) -> Steps:
        if self.size == 1:
            return
        ring = RingStream(chunks, self.rank, op, reduce, gather)
        self.sent += ring.bytes_to_send
        self.received += ring.bytes_to_receive
        right = self.collective[(self.rank + 1) % self.size]
        left = self.collective[(self.rank - 1) % self.size]
        yield from ring.steps(right, left)


def interleave(parts: list[Steps]) -> Steps:
    """Advance all parts in turn until all have ended."""
    while parts:
        parts = [part for part in parts if next(part, ENDED) is not ENDED]
        if parts:
            yield


ENDED = object()


def typed(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
