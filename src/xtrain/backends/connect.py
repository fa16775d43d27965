"""How the ranks of a socket group connect: who dials whom, and who is let in.

Each rank listens for the higher ranks and dials the lower ones, twice: one connection
for collectives and one for messages. Whoever comes must prove himself (`handshake`);
strangers are refused, and keep nobody else from entering.

All of it runs in the thread that forms the group, in turns, until every connection is
made: who has nothing to say holds nobody up.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import re
import secrets
import select
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from xtrain.backends.connections import Connection
from xtrain.backends.handshake import (
    PURPOSES,
    Key,
    Refused,
    admit,
    check_user,
    dial,
    read_secret,
)
from xtrain.backends.liveness import Peers
from xtrain.backends.progress import Steps
from xtrain.backends.rendezvous import GRACE_SECONDS, PeerAddress, Rendezvous, host_key

refusals = logging.getLogger(__name__)

BACKLOG = 4096  # connections that may wait to be accepted
MAX_HANDSHAKES = 256  # handshakes at a time
MAX_LOGGED = 20  # refusals of one group, each in a line of its own
CONNECT_SECONDS = 3.0  # for one attempt, which a full backlog may swallow
AGAIN_SECONDS = 0.01  # between two attempts


def connect_all(
    store: Store, rank: int, size: int, timeout: float, peers: Peers
) -> dict[Key, Connection]:
    """Connect this rank with every other, twice; {(rank, purpose): connection}.

    Each rank listens for the higher ranks and dials the lower ones, again and again if
    need be, until the timeout. RuntimeError naming the ranks that are not connected by
    then, that die or give up, or that prove nothing.
    """
    tasks: list[Acceptor | Dialler] = []
    try:
        with Rendezvous(store, "socket", rank, size, timeout, peers) as rendezvous:
            secret = read_secret()
            listener, endpoint = listen(secret)
            with listener:
                addresses, group = rendezvous.exchange_addresses(endpoint)
                tasks.append(Acceptor(listener, secret, group, rank, size))
                for peer, peer_address in enumerate(addresses[:rank]):
                    for purpose in PURPOSES:
                        tasks.append(
                            Dialler(secret, group, rank, (peer, purpose), peer_address)
                        )
                rendezvous.wait_until(
                    lambda: not [task for task in tasks if not task.advance()],
                    lambda: what_is_missing(tasks),
                )
    except BaseException as error:
        for task in tasks:
            close_all(task.admitted)
        if isinstance(error, (Refused, OSError)):
            raise RuntimeError(f"rank {rank} cannot join the group: {error}") from error
        raise
    finally:
        for task in tasks:
            task.close()
    return {key: made for task in tasks for key, made in task.admitted.items()}


def what_is_missing(tasks: Sequence["Acceptor | Dialler"]) -> str:
    """What is missing, and what is known about the reason."""
    absent = sorted({rank for task in tasks for rank in task.absent()})
    troubles = "; ".join(
        task.trouble for task in tasks if task.absent() and task.trouble
    )
    return f"no connection with ranks {absent}{f' ({troubles})' * bool(troubles)}"


def close_all(connections: dict[Key, Connection]) -> None:
    for connection in connections.values():
        connection.sock.close()


class Acceptor:
    """Admits the higher ranks; refuses and logs everybody else, and stays open."""

    def __init__(
        self, listener: socket.socket, secret: bytes, group: bytes, rank: int, size: int
    ):
        listener.setblocking(False)
        self._listener, self._secret, self._group = listener, secret, group
        self._rank, self._size = rank, size
        higher = range(rank + 1, size)
        self._expected = {(peer, purpose) for peer in higher for purpose in PURPOSES}
        self.admitted: dict[Key, Connection] = {}
        self.trouble = ""
        self.refused = 0
        self._handshakes: list[Handshake] = []

    def absent(self) -> list[int]:
        return sorted({rank for rank, _ in self._expected - self.admitted.keys()})

    def advance(self) -> bool:
        """Let in who has come, hear everybody; True when all who belong are inside."""
        for _ in range(MAX_HANDSHAKES):
            if not self._accept():
                break
        for handshake in list(self._handshakes):
            self._advance_handshake(handshake)
        return not self.absent()

    def close(self) -> None:
        """Send away whoever is still proving himself."""
        for handshake in self._handshakes:
            handshake.connection.sock.close()
        if self.refused > MAX_LOGGED:
            refusals.warning(
                "rank %d refused %d connections in all", self._rank, self.refused
            )

    def _accept(self) -> bool:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody there, or gone again
            return False
        try:
            check_user(sock, self._secret)
            connection = Connection(sock)
        except (Refused, OSError) as error:
            self._refuse(sock, error)
            return True
        steps = admit(
            connection, self._secret, self._group, self._rank, self._size, self.admitted
        )
        self._handshakes.append(Handshake(connection, steps))
        if len(self._handshakes) > MAX_HANDSHAKES:
            first = min(self._handshakes, key=lambda handshake: handshake.proven)
            self._handshakes.remove(first)
            self._refuse(first.connection.sock, Refused("too many were here"))
        return True

    def _advance_handshake(self, handshake: "Handshake") -> None:
        try:
            handshake.proven = next(handshake.steps)
            return
        except StopIteration as end:
            self.admitted[end.value] = handshake.connection
        except (Refused, OSError) as error:
            self._refuse(handshake.connection.sock, error)
        self._handshakes.remove(handshake)

    def _refuse(self, sock: socket.socket, error: Exception) -> None:
        sock.close()
        self.refused += 1
        self.trouble = f"the last refusal: {error}"
        if self.refused <= MAX_LOGGED:
            refusals.warning("rank %d refused a connection: %s", self._rank, error)


@dataclass(eq=False)
class Handshake:
    """Somebody who has come, and how far his handshake is."""

    connection: Connection
    steps: Generator[bool, None, Key]
    proven: bool = False


class Dialler:
    """This rank's way to one connection with a lower rank."""

    def __init__(
        self, secret: bytes, group: bytes, rank: int, key: Key, address: PeerAddress
    ):
        self._secret, self._group, self._rank = secret, group, rank
        self._key, self._address = key, address
        self.admitted: dict[Key, Connection] = {}
        self.trouble = ""
        self._steps = self._dial_until_admitted()

    def absent(self) -> list[int]:
        return [] if self.admitted else [self._key[0]]

    def advance(self) -> bool:
        """Go on; True when the connection is made."""
        return next(self._steps, DIALLED) is DIALLED

    def close(self) -> None:
        self._steps.close()

    def _dial_until_admitted(self) -> Steps:
        refused = 0.0
        while True:
            try:
                self.admitted[self._key] = yield from self._dial()
                return
            except (ConnectionError, TimeoutError, BlockingIOError) as error:
                self.trouble = f"rank {self._key[0]}: {error}"
                gone = isinstance(error, ConnectionRefusedError)
            now = time.monotonic()
            refused = (refused or now) if gone else 0.0
            if gone and now > refused + GRACE_SECONDS:
                raise Refused(f"{self.trouble} at {self._address.endpoint}")
            while time.monotonic() < now + AGAIN_SECONDS:
                yield

    def _dial(self) -> Generator[None, None, Connection]:
        peer, purpose = self._key
        sock = yield from connect_to(
            peer, self._address.endpoint, self._address.host == host_key()
        )
        try:
            check_user(sock, self._secret)
            connection = Connection(sock)
            proving = dial(
                connection, self._secret, self._group, self._rank, peer, purpose
            )
            for _ in proving:
                yield
        except BaseException:
            sock.close()
            raise
        return connection


DIALLED = object()


def listen(secret: bytes) -> tuple[socket.socket, str]:
    """Open a listener: Unix, or TCP where XTRAIN_SOCKET_ADDRESS says so."""
    address = os.environ.get("XTRAIN_SOCKET_ADDRESS", "")
    if not address:
        name = f"xtrain-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")  # abstract: there is no file to leave behind
        listener.listen(BACKLOG)
        return listener, f"unix:{name}"
    if not secret:
        raise ValueError(
            f"XTRAIN_SOCKET_ADDRESS={address} asks for TCP, which needs a secret: set "
            "XTRAIN_SECRET, or XTRAIN_SECRET_FILE to a file that only you can read"
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    host, port = listener.getsockname()[:2]
    return listener, f"tcp:{host}:{port}"


def connect_to(
    peer: int, address: str, same_host: bool
) -> Generator[None, None, socket.socket]:
    """Open a connection to the address that a peer gave."""
    family, target = parse_address(peer, address, same_host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(target)
        end = time.monotonic() + CONNECT_SECONDS
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while error == errno.EINPROGRESS:
            yield
            if poll.poll(0):
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            elif time.monotonic() > end:
                error = errno.ETIMEDOUT
        if error == errno.EADDRNOTAVAIL:  # all ports are in use for the moment
            error = errno.EAGAIN
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def parse_address(peer: int, address: str, same_host: bool) -> tuple[int, Any]:
    """The family and address to connect to; Refused for what no rank writes."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and same_host and UNIX_NAME.fullmatch(rest):
        return socket.AF_UNIX, f"\0{rest}"
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and PORT.fullmatch(port) and int(port) < 1 << 16:
        with contextlib.suppress(ValueError):  # a name would be looked up, and wait
            version = ipaddress.ip_address(host).version
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            return family, (host, int(port))
    raise Refused(
        f"rank {peer} is at {address}, out of reach from here; on several "
        "hosts set XTRAIN_SOCKET_ADDRESS to an address of each host, and "
        "XTRAIN_SECRET to the same secret on all"
    )


UNIX_NAME = re.compile(r"xtrain-[0-9a-f]{32}")
PORT = re.compile(r"[1-9][0-9]{0,4}")
