"""How the ranks of a socket group connect: who dials whom, and who is let in.

Each rank listens for the higher ranks and dials the lower ones, twice: one connection
for collectives and one for messages. Whoever comes must prove himself (`handshake`);
strangers are refused, and keep nobody else from entering.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

from torch.distributed import Store

from xtrain.backends.connections import Connection
from xtrain.backends.handshake import Refused, admit, dial, read_secret
from xtrain.backends.liveness import Peers
from xtrain.backends.meeting import forget, host_key, meet, wait_until

refusals = logging.getLogger(__name__)

# What a connection is for.
COLLECTIVES = 0
MESSAGES = 1
MAX_GUESTS = 64  # handshakes at a time
REACH_SECONDS = 10.0

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
            refusals.warning("rank %d refused a connection: %s", self._rank, error)
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
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            sock.settimeout(REACH_SECONDS)
            sock.connect(f"\0{rest}")
            return sock
        except BlockingIOError:  # as many as may wait at that door do
            if time.monotonic() > end:
                sock.close()
                raise
            time.sleep(0.01)
        except OSError:
            sock.close()
            raise
