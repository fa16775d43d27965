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

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from array import array
from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store

from xtrain.backends.handshake import Refused, admit, dial, read_secret
from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import Disagreement, forget, host_key, meet, wait_until
from xtrain.backends.messages import (
    MAX_MESSAGE_BYTES,
    Garbled,
    Inbox,
    raw,
    read_all,
    write_all,
)
from xtrain.backends.progress import Steps
from xtrain.backends.reducing import nbytes_of, reduce_into
from xtrain.comm.reduce_op import combine, finish

door_log = logging.getLogger(__name__)

# What a connection is for.
COLLECTIVES = 0
MESSAGES = 1
GREETING = struct.Struct("<QQQ")  # number of the call, fingerprint, bytes that follow
GOODBYE = (1 << 64) - 1  # a call number: the sender leaves the group
INLINE_BYTES = 64 << 10  # up to here data rides along with the greeting
BLOCK_BYTES = 128 << 10  # reduced at a time: small enough to still be in the cache
MAX_GUESTS = 64  # handshakes at a time
REACH_SECONDS = 10.0
TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)


class Connection:
    """A connected socket as a stream that never waits."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            tune(sock)
        self.sock = sock
        self.lost = False

    def write(self, data: memoryview) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.lost = True
            return 0

    def read(self, into: memoryview) -> int:
        try:
            count = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError:
            self.lost = True
            return 0
        if count == 0:
            self.lost = True
        return count

    def peek(self, count: int) -> bytes:
        try:
            return self.sock.recv(count, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def close(self) -> None:
        """Close, and have all that was written arrive.

        A socket closed while something in it is unread resets the connection, and what
        is still under way is lost.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):
                pass
        self.lost = True
        self.sock.close()

    def ended(self) -> bool:
        """True when the other side is gone and all it said has been read."""
        if not self.lost:
            try:
                self.lost = (
                    self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                )
            except BlockingIOError:
                pass
            except OSError:
                self.lost = True
        return self.lost


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
        when a fingerprint differs.
        """
        self.calls += 1
        self._arrived = set()
        heard: dict[int, tuple[int, bytearray]] = {}
        rides = {peer: raw(tensor) for peer, tensor in (ride or {}).items()}
        says = [self._say(peer, check, rides.get(peer)) for peer in self.others]
        hears = [self._hear(peer, heard) for peer in self.others]
        yield from together(says + hears)
        if any(fingerprint != check for fingerprint, _ in heard.values()):
            raise Disagreement
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


# -- meeting ---------------------------------------------------------------------------


Key = tuple[int, int]  # rank, purpose


def connect_all(
    store: Store, rank: int, size: int, timeout: float, peers: Peers
) -> dict[Key, Connection]:
    """Connect this rank with every other, twice; {(rank, purpose): connection}.

    Each rank listens for the higher ranks and dials the lower ones.
    """
    secret = read_secret()
    listener, address = listen(secret)
    door, dialled = None, {}
    try:
        entries, group = meet(store, "socket", rank, size, address, timeout, peers)
        door = Door(listener, secret, group, rank, size)
        for peer, entry in enumerate(entries[:rank]):
            for purpose in (COLLECTIVES, MESSAGES):
                sock = reach(peer, entry.address, entry.host == host_key())
                dialled[peer, purpose] = Connection(sock)
                dial(sock, secret, group, rank, peer, purpose)
                sock.setblocking(False)
        wait_until(
            door.complete, peers, timeout,
            lambda: f"no connection from ranks {door.absent()}",
        )  # fmt: skip
    except (Refused, OSError) as error:
        close_all(dialled)
        raise RuntimeError(f"rank {rank} cannot join the group: {error}") from error
    except BaseException:
        close_all(dialled)
        raise
    finally:
        listener.close()
        if door is not None:
            door.close()
    forget(store, "socket", rank)
    return dialled | door.admitted


def close_all(connections: dict[Key, Connection]) -> None:
    for connection in connections.values():
        connection.sock.close()


class Door:
    """Admits the higher ranks; refuses and logs everybody else, and stays open."""

    def __init__(
        self, listener: socket.socket, secret: bytes, group: bytes, rank: int, size: int
    ):
        self._listener, self._secret, self._group = listener, secret, group
        self._rank, self._size = rank, size
        higher = range(rank + 1, size)
        self._expected = {(r, p) for r in higher for p in (COLLECTIVES, MESSAGES)}
        self.admitted: dict[Key, Connection] = {}
        self._guests: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._porter = threading.Thread(target=self._stand, name="xtrain-door")
        self._porter.start()

    def complete(self) -> bool:
        return self._expected == self.admitted.keys()

    def absent(self) -> list[int]:
        return sorted({rank for rank, _ in self._expected - self.admitted.keys()})

    def close(self) -> None:
        """Send away whoever is still proving himself."""
        self._closed = True
        self._porter.join()
        inside = {connection.sock for connection in self.admitted.values()}
        for guest, sock in self._guests.items():
            if sock not in inside:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            guest.join()
        if not self.complete():
            close_all(self.admitted)

    def _stand(self) -> None:
        with contextlib.suppress(OSError):  # closed before the door stood open
            self._listener.settimeout(0.01)
        while not self._closed and not self.complete():
            self._guests = {t: s for t, s in self._guests.items() if t.is_alive()}
            if len(self._guests) >= MAX_GUESTS:
                time.sleep(0.01)
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody within the time, or the listener is closed
                continue
            guest = threading.Thread(target=self._admit, args=(sock,), daemon=True)
            self._guests[guest] = sock
            guest.start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            key = admit(sock, self._secret, self._group, self._rank, self._size)
            connection = Connection(sock)
            with self._lock:
                if key not in self._expected or key in self.admitted:
                    raise Refused(f"rank {key[0]} is connected already")
                self.admitted[key] = connection
        except (Refused, OSError) as error:
            door_log.warning("rank %d refused a connection: %s", self._rank, error)
            sock.close()


def listen(secret: bytes) -> tuple[socket.socket, str]:
    """Open a listener: Unix, or TCP where XTRAIN_SOCKET_ADDRESS says so."""
    address = os.environ.get("XTRAIN_SOCKET_ADDRESS", "")
    if not address:
        name = f"xtrain-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")  # abstract: there is no file to leave behind
        listener.listen(MAX_GUESTS)
        return listener, f"unix:{name}"
    if not secret:
        raise ValueError(
            f"XTRAIN_SOCKET_ADDRESS={address} asks for TCP, which needs a secret: set "
            "XTRAIN_SECRET, or XTRAIN_SECRET_FILE to a file that only you can read"
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=MAX_GUESTS)
    return listener, f"tcp:{address}:{listener.getsockname()[1]}"


def reach(peer: int, address: str, same_host: bool) -> socket.socket:
    """Open a connection to the address that a peer gave."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal():
        return socket.create_connection((host, int(port)), REACH_SECONDS)
    if kind != "unix" or not same_host:
        raise Refused(
            f"rank {peer} is at {address}, out of reach from here; on several "
            "hosts set XTRAIN_SOCKET_ADDRESS to an address of each host, and "
            "XTRAIN_SECRET to the same secret on all"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(REACH_SECONDS)
        sock.connect(f"\0{rest}")
    except OSError:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """No waiting for more data, and have the system notice a vanished host.

    Probes go out when a connection is idle; what is sent must be confirmed in time.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in WATCH.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sock.getpeername()[0] in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):  # paced algorithms lose time on loopback
            sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, b"cubic")


WATCH = {
    "TCP_KEEPIDLE": 1,  # seconds of silence before the first probe
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 4000,  # milliseconds until sent data must be confirmed
}
