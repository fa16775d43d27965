"""Addresses of socket groups: open a listener, and connect to a peer's.

unix:xtrain-<random>     inside one host: an abstract Unix socket
tcp:<host>:<port>        across hosts, where XTRAIN_SOCKET_ADDRESS asks for it
"""

import contextlib
import errno
import ipaddress
import os
import re
import secrets
import select
import socket
import time
from collections.abc import Generator
from typing import Any

from xtrain.backends.handshake import Refused

BACKLOG = 4096  # connections that may wait to be accepted
CONNECT_SECONDS = 3.0  # for one attempt, which a full backlog may swallow
UNIX_NAME = re.compile(r"xtrain-[0-9a-f]{32}")
PORT = re.compile(r"[1-9][0-9]{0,4}")


def listen(secret: bytes) -> tuple[socket.socket, str]:
    """Open a listener: Unix, or TCP where XTRAIN_SOCKET_ADDRESS is set."""
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
    """The family and address to connect to; Refused for any other text."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and same_host and UNIX_NAME.fullmatch(rest):
        return socket.AF_UNIX, f"\0{rest}"
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and PORT.fullmatch(port) and int(port) < 1 << 16:
        with contextlib.suppress(ValueError):  # a name: its look-up would block
            version = ipaddress.ip_address(host).version
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            return family, (host, int(port))
    raise Refused(
        f"rank {peer} is at {address}, out of reach from here; on several "
        "hosts set XTRAIN_SOCKET_ADDRESS to an address of each host, and "
        "XTRAIN_SECRET to the same secret on all"
    )
