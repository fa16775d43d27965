"""Who may join: every connection proves itself, both ways, before it carries a tensor.

The ranks find each other through torch's store, which anybody who reaches its port can
read and write. So nothing secret goes there, and nothing read there is believed without
proof.

With a secret (the environment variable XTRAIN_SECRET, or the path of a file that only
the user can read in XTRAIN_SECRET_FILE) each side shows that it knows it, by keyed
hashes over fresh random numbers of both sides, the group, both ranks and the purpose: a
recorded handshake proves nothing a second time, nor in another group. Without a secret
only processes of the same user on the same host get in, by the word of the kernel.

    dialler   -> greeting: magic, group, ranks, purpose, nonce
    listener  -> nonce, HMAC("listener", everything above)
    dialler   -> HMAC("dialler", everything above)
    listener  -> welcome
"""

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from pathlib import Path

HELLO = struct.Struct("<8s32sIIB16s")
MAGIC = b"xtrain\x00\x01"
WELCOME = b"welcome!"
NONCE_BYTES = 16
PROOF_BYTES = 32
SECONDS = 5.0  # that the listener gives a dialler
DIAL_SECONDS = 30.0  # that a dialler gives the listener, which may still be meeting


class Refused(Exception):
    """The other side could not prove what it claims."""


def read_secret() -> bytes:
    """The secret of this user's jobs; empty when there is none."""
    text = os.environ.get("XTRAIN_SECRET")
    if text:
        return text.encode()
    path = os.environ.get("XTRAIN_SECRET_FILE")
    if not path:
        return b""
    status = Path(path).stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"XTRAIN_SECRET_FILE {path}: must belong to you and be readable by nobody "
            f"else (mode 600), it has mode {stat.S_IMODE(status.st_mode):o}"
        )
    secret = Path(path).read_bytes().strip()
    if not secret:
        raise ValueError(f"XTRAIN_SECRET_FILE {path} is empty")
    return secret


def dial(
    sock: socket.socket, secret: bytes, group: bytes, me: int, peer: int, purpose: int
) -> None:
    """Prove this side to the listener and have it prove itself, or raise Refused."""
    end = time.monotonic() + DIAL_SECONDS
    check_user(sock, secret)
    nonce = secrets.token_bytes(NONCE_BYTES)
    greeting = HELLO.pack(MAGIC, group, me, peer, purpose, nonce)
    sock.sendall(greeting)
    theirs = read_exactly(sock, NONCE_BYTES, end)
    said = greeting + theirs
    if not hmac.compare_digest(
        read_exactly(sock, PROOF_BYTES, end), proof(secret, b"listener", said)
    ):
        raise Refused(f"the listener of rank {peer} does not know the secret")
    sock.sendall(proof(secret, b"dialler", said))
    if read_exactly(sock, len(WELCOME), end) != WELCOME:
        raise Refused(f"rank {peer} did not welcome rank {me}")


def admit(
    sock: socket.socket, secret: bytes, group: bytes, me: int, size: int
) -> tuple[int, int]:
    """Have a dialler prove itself; its rank and purpose, or Refused."""
    end = time.monotonic() + SECONDS
    check_user(sock, secret)
    greeting = read_exactly(sock, HELLO.size, end)
    magic, their_group, rank, target, purpose, _ = HELLO.unpack(greeting)
    if magic != MAGIC:
        raise Refused("no greeting of ours")
    if not hmac.compare_digest(their_group, group):
        raise Refused(f"rank {rank} of another group")
    if target != me or not me < rank < size:
        raise Refused(
            f"rank {rank} dialled for rank {target}, this is rank {me} of {size}"
        )
    said = greeting + secrets.token_bytes(NONCE_BYTES)
    sock.sendall(said[HELLO.size :] + proof(secret, b"listener", said))
    answer = read_exactly(sock, PROOF_BYTES, end)
    if not hmac.compare_digest(answer, proof(secret, b"dialler", said)):
        raise Refused(f"rank {rank} does not know the secret")
    sock.sendall(WELCOME)
    return rank, purpose


def proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.new(secret, role + b"\x00" + said, hashlib.sha256).digest()


def check_user(sock: socket.socket, secret: bytes) -> None:
    """Without a secret the kernel must vouch for the other process's user."""
    if secret:
        return
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        raise Refused("no secret, and the kernel cannot tell whose process this is")
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise Refused(f"a process of user {user}, this one belongs to {os.getuid()}")


def read_exactly(sock: socket.socket, count: int, end: float) -> bytes:
    """The next `count` bytes, or Refused; all of them are here by the time `end`."""
    data = bytearray()
    while len(data) < count:
        left = end - time.monotonic()
        sock.settimeout(max(left, 0.001))
        try:
            piece = sock.recv(count - len(data)) if left > 0 else b""
        except TimeoutError:
            piece = b""
        if not piece:
            how = "closed" if time.monotonic() < end else "too late"
            raise Refused(f"{how} after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)
