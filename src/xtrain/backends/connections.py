"""A socket as a stream of bytes that never waits."""

import contextlib
import socket

TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
BUFFER_BYTES = 512 << 10  # of a Unix socket: work for the receiver while others run


class Connection:
    """A connected socket as a stream that never waits."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        else:
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

        Closing a socket with unread bytes resets the connection, and bytes that have
        not been delivered yet are lost.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):
                pass
        self.lost = True
        self.sock.close()

    def ended(self) -> bool:
        """True when the other side has closed and all it sent has been read."""
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
