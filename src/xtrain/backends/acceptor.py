"""The listening side of a rank: it admits the higher ranks and refuses all others.

Many connections may be in their handshake at the same time. All are advanced in turns,
so a silent one delays none of the others. When there are too many, the earliest one
that has proven nothing yet is closed.
"""

import logging
import socket
from collections.abc import Generator
from dataclasses import dataclass

from xtrain.backends.connections import Connection
from xtrain.backends.handshake import PURPOSES, Key, Refused, admit, check_user

refusals = logging.getLogger(__name__)

MAX_HANDSHAKES = 256  # at a time
MAX_LOGGED = 20  # refusals of one group, each in a line of its own


class Acceptor:
    """Admits the higher ranks; refuses and logs all others, and stays open."""

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
        """Accept, and go on with all handshakes; True when all higher ranks are in."""
        for _ in range(MAX_HANDSHAKES):
            if not self._accept():
                break
        for handshake in list(self._handshakes):
            self._advance_handshake(handshake)
        return not self.absent()

    def close(self) -> None:
        """Close the connections that are still in their handshake."""
        for handshake in self._handshakes:
            handshake.connection.sock.close()
        if self.refused > MAX_LOGGED:
            refusals.warning(
                "rank %d refused %d connections in all", self._rank, self.refused
            )

    def _accept(self) -> bool:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # no connection waits, or it has been closed
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
    """An accepted connection that has not been admitted yet."""

    connection: Connection
    steps: Generator[bool, None, Key]
    proven: bool = False  # the other side has shown its first proof
