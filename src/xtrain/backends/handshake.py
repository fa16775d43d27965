"""Who may join: every connection proves itself, both ways, before it carries a tensor.

The ranks find each other through torch's store, which every process that reaches its
port can read and write. So nothing secret is written there, and nothing that is read
there is believed without proof.

With a secret (the environment variable XTRAIN_SECRET, or the path of a file that only
the user can read in XTRAIN_SECRET_FILE) each side shows that it knows it, by keyed
hashes over the group, both ranks, the purpose and fresh random numbers of both sides: a
recorded handshake proves nothing a second time, nor in another group. The digest that
names the group covers the ranks' real addresses (`rendezvous`): ranks that a relay
brings together, having put its own address into the store, prove nothing to each other.
Without a secret only processes of the same user on the same host are
admitted: the kernel names the user.

    dialler   -> hello: magic, group, ranks, purpose, nonce; HMAC("dialler", it)
    listener  -> answer, nonce, HMAC("listener", everything above)
    dialler   -> HMAC("dialler again", everything above)
    listener  -> HMAC("welcome", everything above)

The side that dials proves itself first: an impostor gets no hash to try secrets on.
"""

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Container, Generator
from pathlib import Path

from xtrain.backends.connections import Connection

HELLO = struct.Struct("<8s32sIIB16s")
MAGIC = b"xtrain\x00\x02"
ANSWER = struct.Struct("<B16s32s")  # one of the next five, nonce, proof
GO_ON, NO_SECRET, OTHER_GROUP, OTHER_RANK, TAKEN = range(5)
REASONS = {
    OTHER_GROUP: "was given other addresses by the store than rank {me}: "
    "another process writes there, or it belongs to another group",
    OTHER_RANK: "does not expect rank {me}",
    TAKEN: "is connected with a rank {me} already",
}
# What a connection is for.
COLLECTIVES = 0
MESSAGES = 1
PURPOSES = (COLLECTIVES, MESSAGES)
NONCE_BYTES = 16
PROOF_BYTES = 32
MIN_SECRET_BYTES = 16
HELLO_SECONDS = 0.5  # for the first proof; a rank that was slower dials again
PROOF_SECONDS = 5.0  # for the second

Key = tuple[int, int]  # rank, purpose


class Refused(Exception):
    """The other side could not prove what it claims."""


def read_secret() -> bytes:
    """The secret of this user's jobs; empty when there is none."""
    text = os.environ.get("XTRAIN_SECRET")
    if text:
        return long_enough("XTRAIN_SECRET", text.encode())
    path = os.environ.get("XTRAIN_SECRET_FILE")
    if not path:
        return b""
    status = Path(path).stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"XTRAIN_SECRET_FILE {path}: must belong to you and be readable only "
            f"by you (mode 600), it has mode {stat.S_IMODE(status.st_mode):o}"
        )
    return long_enough(f"XTRAIN_SECRET_FILE {path}", Path(path).read_bytes().strip())


def long_enough(source: str, secret: bytes) -> bytes:
    """The secret; ValueError for one that could be guessed from a recorded proof."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{source}: a secret has at least {MIN_SECRET_BYTES} bytes, this one has "
            f"{len(secret)}; make one with: openssl rand -hex 32"
        )
    return secret


def dial(
    connection: Connection,
    secret: bytes,
    group: bytes,
    me: int,
    peer: int,
    purpose: int,
) -> Generator[bool, None, None]:
    """Prove this side to the listener and have it prove itself, or raise Refused.

    Yields while there is nothing to read. ConnectionError when the listener hangs up:
    it may have been busy, so a rank dials again.
    """
    hello = HELLO.pack(
        MAGIC, group, me, peer, purpose, secrets.token_bytes(NONCE_BYTES)
    )
    transcript = hello + proof(secret, b"dialler", hello)
    send_now(connection, transcript)
    answer = yield from read_exactly(connection, ANSWER.size)
    status, _, shown = ANSWER.unpack(answer)
    if status == NO_SECRET:
        raise Refused(f"rank {peer} holds another secret than rank {me}")
    transcript += answer[:-PROOF_BYTES]
    if not hmac.compare_digest(shown, proof(secret, b"listener", transcript)):
        raise Refused(f"the listener of rank {peer} does not know the secret")
    if status != GO_ON:
        reason = REASONS.get(status, "does not want rank {me}")
        raise Refused(f"rank {peer} {reason.format(me=me)}")
    transcript += shown
    transcript += proof(secret, b"dialler again", transcript)
    send_now(connection, transcript[-PROOF_BYTES:])
    welcome = yield from read_exactly(connection, PROOF_BYTES)
    if not hmac.compare_digest(welcome, proof(secret, b"welcome", transcript)):
        raise Refused(f"rank {peer} did not welcome rank {me}")


def admit(
    connection: Connection,
    secret: bytes,
    group: bytes,
    me: int,
    size: int,
    admitted: Container[Key],
) -> Generator[bool, None, Key]:
    """Have a dialler prove itself; its rank and purpose, or Refused.

    Yields while there is nothing to read: whether the dialler has proven itself once.
    """
    now = time.monotonic()
    hello = yield from read_exactly(connection, HELLO.size, now + HELLO_SECONDS)
    magic, their_group, rank, target, purpose, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise Refused("no hello of ours")
    shown = yield from read_exactly(connection, PROOF_BYTES, now + HELLO_SECONDS)
    if not hmac.compare_digest(shown, proof(secret, b"dialler", hello)):
        send_now(
            connection, ANSWER.pack(NO_SECRET, bytes(NONCE_BYTES), bytes(PROOF_BYTES))
        )
        raise Refused(f"rank {rank} does not know the secret")
    answer, reason = GO_ON, ""
    if not hmac.compare_digest(their_group, group):
        answer, reason = OTHER_GROUP, f"rank {rank} of another group"
    elif target != me or not me < rank < size or purpose not in PURPOSES:
        answer = OTHER_RANK
        reason = f"rank {rank} dialled for rank {target}, this is rank {me} of {size}"
    elif (rank, purpose) in admitted:
        answer, reason = TAKEN, f"rank {rank} is connected already"
    transcript = hello + shown + bytes([answer]) + secrets.token_bytes(NONCE_BYTES)
    transcript += proof(secret, b"listener", transcript)
    send_now(connection, transcript[-ANSWER.size :])
    if answer != GO_ON:
        raise Refused(reason)
    shown = yield from read_exactly(
        connection, PROOF_BYTES, now + PROOF_SECONDS, proven=True
    )
    if not hmac.compare_digest(shown, proof(secret, b"dialler again", transcript)):
        raise Refused(f"rank {rank} does not know the secret")
    if (rank, purpose) in admitted:
        raise Refused(f"rank {rank} is connected already")
    send_now(connection, proof(secret, b"welcome", transcript + shown))
    return rank, purpose


def proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, role + b"\x00" + transcript, hashlib.sha256).digest()


def check_user(sock: socket.socket, secret: bytes) -> None:
    """On a Unix socket the kernel must vouch for the other process's user.

    Over TCP it cannot, so there the secret must.
    """
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        if not secret:
            raise Refused("no secret, and the kernel cannot tell whose process this is")
        return
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise Refused(f"a process of user {user}, this one belongs to {os.geteuid()}")


def send_now(connection: Connection, data: bytes) -> None:
    """Write at once: a new connection has room for all of a handshake."""
    if connection.write(memoryview(data)) != len(data):
        raise ConnectionError("closed before it was answered")


def read_exactly(
    connection: Connection,
    count: int,
    end: float = float("inf"),
    proven: bool = False,
) -> Generator[bool, None, bytes]:
    """The next `count` bytes; Refused unless all of them are here by the time `end`."""
    data = bytearray(count)
    left = memoryview(data)
    while left.nbytes:
        got = connection.read(left)
        left = left[got:]
        if not got:
            so_far = f"after {count - left.nbytes} of {count} bytes"
            if connection.lost:
                raise ConnectionError(f"closed {so_far}")
            if time.monotonic() > end:
                raise Refused(f"too late {so_far}")
            yield proven
    return bytes(data)
