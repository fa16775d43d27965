"""How the ranks of a socket group connect with each other.

Each rank listens for the higher ranks (`acceptor`) and dials the lower ones, twice: one
connection for collectives and one for messages. Both sides of a connection prove
themselves before it is used (`handshake`).

All of it runs in the thread that forms the group, in turns, until every connection is
made: a silent peer holds up no other.
"""

import time
from collections.abc import Generator, Sequence

from torch.distributed import Store

from xtrain.backends.acceptor import Acceptor
from xtrain.backends.addresses import connect_to, listen
from xtrain.backends.connections import Connection
from xtrain.backends.handshake import (
    PURPOSES,
    Key,
    Refused,
    check_user,
    dial,
    read_secret,
)
from xtrain.backends.operation import Steps
from xtrain.backends.peers import Peers
from xtrain.backends.rendezvous import GRACE_SECONDS, PeerAddress, Rendezvous, host_key

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
    """The ranks that are not connected, and what is known about the reason."""
    absent = sorted({rank for task in tasks for rank in task.absent()})
    troubles = "; ".join(
        task.trouble for task in tasks if task.absent() and task.trouble
    )
    return f"no connection with ranks {absent}{f' ({troubles})' * bool(troubles)}"


def close_all(connections: dict[Key, Connection]) -> None:
    for connection in connections.values():
        connection.sock.close()


class Dialler:
    """Dials one lower rank for one purpose until it is admitted."""

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
