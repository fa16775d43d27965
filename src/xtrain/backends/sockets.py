"""Collectives over plain sockets: every rank is connected to every other.

A collective begins with a greeting to everybody: the number of the call and its
fingerprint. So all ranks know that all are there and in the same call before data
moves. Small data rides along with the greeting; large data runs around a ring, as one
stream:

    rank r    receives a piece from rank r - 1, reduces it into its own,
              and sends the reduced prefix on while the rest still arrives

That is lc1's ring without its pauses between steps: no rank waits for a whole chunk
before it passes the beginning on.

Inside one host the connections are Unix sockets, across hosts TCP. Two for each pair,
one for collectives and one for messages, so that neither can hold the other up.
"""

import struct
from array import array
from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.calls import compare
from xtrain.backends.connect import connect_all
from xtrain.backends.handshake import COLLECTIVES, MESSAGES
from xtrain.backends.liveness import Peers
from xtrain.backends.messages import (
    MAX_MESSAGE_BYTES,
    Garbled,
    Inbox,
    raw,
    read_all,
    write_all,
)
from xtrain.backends.pieces import BLOCK_BYTES, nbytes_of
from xtrain.backends.progress import Steps
from xtrain.backends.rendezvous import Disagreement
from xtrain.comm.reduce_op import combine, finish, reduce_into

GREETING = struct.Struct("<QQQ")  # number of the call, fingerprint, bytes that follow
GOODBYE = (1 << 64) - 1  # a call number: the sender leaves the group
INLINE_BYTES = 64 << 10  # up to here data rides along with the greeting


class Sockets:
    """The transport of one group; see the module's text.

    Args:
        store: where the ranks tell each other their addresses, and nothing secret.
        peers: watches the processes of the other ranks on this host.

    `sent` and `received` count the bytes of tensors that collectives moved; greetings
    and headers are not in them.
    """

    PATIENCE = 0.3  # what a rank sent before it died may still be on its way

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, peers: Peers
    ):
        self.rank, self.size = rank, size
        self.calls = self.sent = self.received = 0
        self.in_call = False
        self.apart: list[int] = []  # fingerprints of a call from different lines
        self._said_goodbye: set[int] = set()
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

    # -- the greeting ------------------------------------------------------------------

    def greet(
        self, check: int, ride: dict[int, Tensor] | None = None
    ) -> Generator[None, None, dict[int, bytearray]]:
        """Tell everybody the call, with a small tensor for some, and hear everybody.

        Returns what rode along with the others' greetings, by rank. Raises Disagreement
        when a fingerprint differs in more than the line.
        """
        self.calls += 1
        self._arrived = set()
        heard: dict[int, tuple[int, bytearray]] = {}
        rides = {peer: raw(tensor) for peer, tensor in (ride or {}).items()}
        says = [self._say(peer, check, rides.get(peer)) for peer in self.others]
        hears = [self._hear(peer, heard) for peer in self.others]
        yield from together(says + hears)
        if any(fingerprint != check for fingerprint, _ in heard.values()):
            everyone = [heard.get(r, (check,))[0] for r in range(self.size)]
            self.apart = compare(everyone)
        return {peer: data for peer, (_, data) in heard.items()}

    def _say(self, peer: int, check: int, ride: memoryview | None) -> Steps:
        nbytes = 0 if ride is None else ride.nbytes
        header = GREETING.pack(self.calls, check, nbytes)
        yield from write_all(self.collective[peer], memoryview(header))
        if ride is not None:
            self.sent += nbytes
            yield from write_all(self.collective[peer], ride)

    def _hear(self, peer: int, heard: dict[int, tuple[int, bytearray]]) -> Steps:
        header = bytearray(GREETING.size)
        yield from read_all(self.collective[peer], memoryview(header))
        call, fingerprint, nbytes = GREETING.unpack(header)
        if call == GOODBYE:
            self._said_goodbye.add(peer)
        while peer in self._said_goodbye:
            yield  # in vain, as the next look at the peers will tell
        if call != self.calls or nbytes > INLINE_BYTES:
            raise Garbled(
                f"rank {peer} greeted for call {call} with {nbytes} bytes, "
                f"rank {self.rank} is in call {self.calls}"
            )
        data = bytearray(nbytes)
        self.received += nbytes
        yield from read_all(self.collective[peer], memoryview(data))
        heard[peer] = (fingerprint, data)
        self._arrived.add(peer)

    def describe(self, text: str) -> Steps:
        """Exchange descriptions of the calls in which the ranks disagree."""
        encoded = torch.frombuffer(bytearray(text.encode()[:4096]), dtype=torch.uint8)
        heard = yield from self.greet(0, dict.fromkeys(self.others, encoded))
        self._descriptions = {peer: data.decode() for peer, data in heard.items()}

    def description(self, peer: int) -> str:
        return self._descriptions[peer]

    # -- who is there ------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The ranks that have not come to this rank's call."""
        return [peer for peer in self.others if peer not in self._arrived]

    def lost(self) -> list[int]:
        """The ranks whose connection ended without a goodbye."""
        self._read_goodbyes()
        return [
            peer
            for peer in self.others
            if peer not in self._said_goodbye and self.collective[peer].ended()
        ]

    def left(self) -> list[int]:
        """The ranks that have destroyed the group."""
        self._read_goodbyes()
        return sorted(self._said_goodbye)

    def _read_goodbyes(self) -> None:
        if self.in_call:
            return  # what lies there may be data; `_hear` reads the greetings
        for peer in self.others:
            head = self.collective[peer].peek(GREETING.size)
            if len(head) == GREETING.size and GREETING.unpack(head)[0] == GOODBYE:
                self._said_goodbye.add(peer)

    def close(self) -> None:
        """Say goodbye and close all connections."""
        goodbye = memoryview(GREETING.pack(GOODBYE, 0, 0))
        for connection in self.collective.values():
            connection.write(goodbye)
        for inbox in self.inbox.values():
            inbox.close()
        for connection in (*self.collective.values(), *self.outbox.values()):
            connection.close()

    # -- collectives: flat contiguous tensors, `check` the call's fingerprint ----------

    def barrier(self, check: int) -> Steps:
        yield from self.greet(check)

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType, check: int) -> Steps:
        if nbytes_of(flat) <= INLINE_BYTES:
            heard = yield from self.greet(check, dict.fromkeys(self.others, flat))
            mine = flat.clone()
            shares = [
                mine if rank == self.rank else typed(heard[rank], flat.dtype)
                for rank in range(self.size)
            ]
            reduce_into(flat, shares, op)  # in rank order: all ranks get the same bits
            return
        yield from self.greet(check)
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
        yield from self.greet(check)
        chunks = [chunk.clone() for chunk in inputs]
        yield from self._ring(chunks, op, reduce=True, gather=False)
        output.copy_(chunks[self.rank])

    def all_gather(self, outputs: list[Tensor], input: Tensor, check: int) -> Steps:
        yield from self.greet(check)
        outputs[self.rank].copy_(input)
        yield from self._ring(outputs, ReduceOp.SUM, reduce=False, gather=True)

    def broadcast(self, flat: Tensor, root: int, check: int) -> Steps:
        """A chain from the root, each rank passing the beginning on at once."""
        small = nbytes_of(flat) <= INLINE_BYTES
        ride = dict.fromkeys(self.others, flat) if small and self.rank == root else None
        heard = yield from self.greet(check, ride)
        if small:
            if self.rank != root:
                flat.copy_(typed(heard[root], flat.dtype))
            return
        data, place = raw(flat), (self.rank - root) % self.size
        have, sent = data.nbytes if place == 0 else 0, 0
        last = place == self.size - 1
        self.received += data.nbytes - have
        self.sent += 0 if last else data.nbytes
        while have < data.nbytes or (sent < data.nbytes and not last):
            moved = 0
            if have < data.nbytes:
                left = self.collective[(self.rank - 1) % self.size]
                moved += left.read(data[have:])
                have += moved
            if sent < have and not last:
                count = self.collective[(self.rank + 1) % self.size].write(
                    data[sent:have]
                )
                sent, moved = sent + count, moved + count
            if not moved:
                yield

    def all_to_all(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        yield from self._agree_on_sizes(outputs, inputs, check)
        outputs[self.rank].copy_(inputs[self.rank])
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.sent += sum(nbytes_of(inputs[peer]) for peer in order)
        self.received += sum(nbytes_of(outputs[peer]) for peer in order)
        yield from together(
            [write_all(self.collective[peer], raw(inputs[peer])) for peer in order]
            + [read_all(self.collective[peer], raw(outputs[peer])) for peer in order]
        )

    def _agree_on_sizes(
        self, outputs: list[Tensor], inputs: list[Tensor], check: int
    ) -> Steps:
        """Raise Disagreement, on all ranks, when somebody expects what is not sent."""
        counts = array("q", [t.numel() for t in (*inputs, *outputs)])
        mine = torch.frombuffer(counts, dtype=torch.int64)
        before = self.sent, self.received
        heard = yield from self.greet(check, dict.fromkeys(self.others, mine))
        self.sent, self.received = before  # no tensor's bytes
        rows = [
            mine if rank == self.rank else typed(heard[rank], torch.int64)
            for rank in range(self.size)
        ]
        gives, takes = torch.stack(rows).split(self.size, dim=1)
        if not torch.equal(gives, takes.T):
            raise Disagreement

    def _ring(
        self,
        chunks: list[Tensor],
        op: ReduceOp.RedOpType,
        reduce: bool,
        gather: bool,
    ) -> Steps:
        """Run chunks around the ring as one stream: see the module's text.

        The k-th chunk that a rank sends is the k-th it received one step earlier, and
        no byte of it leaves before it has been received (and reduced).
        """
        if self.size == 1:
            return
        rank, size = self.rank, self.size
        hops = size - 1
        first = rank - 1 if reduce else rank
        total = hops * (reduce + gather)
        order = [(first - step) % size for step in range(total + 1)]
        out, inn = (
            self.collective[(rank + 1) % size],
            self.collective[(rank - 1) % size],
        )
        views = [raw(chunks[index]) for index in order]
        ready = [0] * (total + 1)  # bytes of views[k] that may be sent
        ready[0] = views[0].nbytes
        itemsize = chunks[0].element_size()
        block = torch.empty(BLOCK_BYTES // itemsize, dtype=chunks[0].dtype)
        block_view, filled = raw(block), 0
        sending, sent, receiving = 0, 0, 1
        self.sent += sum(view.nbytes for view in views[:-1])
        self.received += sum(view.nbytes for view in views[1:])
        while sending < total or receiving <= total:
            moved = False
            if sending < total:
                if sent < ready[sending]:
                    count = out.write(views[sending][sent : ready[sending]])
                    sent, moved = sent + count, moved or count > 0
                if sent == views[sending].nbytes:
                    sending, sent, moved = sending + 1, 0, True
            if receiving <= total:
                view = views[receiving]
                left = view.nbytes - ready[receiving]
                if left == 0:
                    receiving, moved = receiving + 1, True
                elif reduce and receiving <= hops:
                    want = min(left, BLOCK_BYTES)
                    filled_now = inn.read(block_view[filled:want])
                    filled, moved = filled + filled_now, moved or filled_now > 0
                    if filled == want:
                        start, count = ready[receiving] // itemsize, want // itemsize
                        target = chunks[order[receiving]][start : start + count]
                        combine(target, block[:count], op)
                        if receiving == hops:  # complete, before any of it leaves
                            finish(target, op, size)
                        ready[receiving], filled = ready[receiving] + want, 0
                else:
                    count = inn.read(view[ready[receiving] :])
                    ready[receiving] += count
                    moved = moved or count > 0
            if not moved:
                yield


def together(parts: list[Steps]) -> Steps:
    """Advance all parts in turn until all have ended."""
    while parts:
        parts = [part for part in parts if next(part, ENDED) is not ENDED]
        if parts:
            yield


ENDED = object()


def typed(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
