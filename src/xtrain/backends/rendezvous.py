"""The rendezvous of a new group: ranks exchange addresses, and notice who is lost.

Each rank puts one line into torch's store (where its process is, how to reach it) and
reads those of the others. The store is not authenticated: these lines are hints, and
what they lead to must prove itself.
"""

import contextlib
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from torch.distributed import Store

from xtrain.backends.peers import Peers

POLL_SECONDS = 0.001
RECHECK_SECONDS = 0.02  # between two lines that are read once more
GRACE_SECONDS = 1.0  # for a rank that has given up to come again
GAVE_UP = "gave-up "
LINE = re.compile(r"(\S{1,200}) ([1-9]\d{0,8}) [0-9a-f]{32} (\S{1,200})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a rank is: its host, its process, and how to reach it there."""

    host: str
    pid: int
    endpoint: str


class Rendezvous:
    """One rank's way into a group that forms, as a context.

    Args:
        kind: keeps the lines of different transports apart.
        seconds: the limit of all of it, from now on: the timeout that
            `init_process_group` or `new_group` was given. gloo's groups have the same
            one.
        peers: watches the processes of this host from the moment they are known.

    A rank that fails leaves the reason in its line, so those who wait for it, and those
    who come later, are told.
    """

    def __init__(
        self, store: Store, kind: str, rank: int, size: int, seconds: float,
        peers: Peers,
    ):  # fmt: skip
        self._store, self._kind, self._peers = store, kind, peers
        self.rank, self._size, self._seconds = rank, size, seconds
        self._end = time.monotonic() + seconds
        self._lines: dict[int, str] = {}
        self._addresses: dict[int, PeerAddress] = {}
        self._gave_up: dict[int, str] = {}  # lines of ranks that may come again
        self._retry_until: dict[int, float] = {}  # when that is over
        self._next_recheck, self._rechecked = 0.0, 0
        self._reason: str | None = None

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take this rank's line back, or leave the reason why it gave up."""
        line = ""
        if error is not None:
            why = str(error) or type(error).__name__
            line = self._reason or f"rank {self.rank} gave up this group: {why}"
            line = GAVE_UP + line
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self.rank), line)

    def exchange_addresses(self, endpoint: str) -> tuple[list[PeerAddress], bytes]:
        """Give this rank's endpoint; all addresses in rank order, and a digest of them.

        The digest names the group: random numbers of all ranks are in it. A rank's own
        line goes into its digest as the rank wrote it, whatever the store holds now. So
        two ranks have the same digest only if each has read what the other has written.

        Raises RuntimeError naming the ranks that die, give up or do not come in time.
        """
        mine = f"{host_key()} {os.getpid()} {secrets.token_hex(16)} {endpoint}"
        self._lines[self.rank] = mine
        self._addresses[self.rank] = parse_peer_address(self.rank, mine)
        self._store.set(self._key(self.rank), mine)
        self.wait_until(
            self._all_here, lambda: f"nothing was heard from ranks {self._absent()}"
        )
        ranks = range(self._size)
        lines = [hashlib.sha256(self._lines[rank].encode()).digest() for rank in ranks]
        digest = hashlib.sha256(b"".join(lines)).digest()
        return [self._addresses[rank] for rank in ranks], digest

    def wait_until(self, ready: Callable[[], bool], why: Callable[[], str]) -> None:
        """Poll `ready`; RuntimeError when a rank dies or gives up, or the time is over.

        In the last case with the reason.
        """
        while not ready():
            dead = self._peers.dead()
            if dead and not ready():
                names = ", ".join(f"rank {peer}" for peer in dead)
                raise RuntimeError(f"{names} died while the group was being formed")
            self._recheck_one()
            if time.monotonic() > self._end:
                for line in self._gave_up.values():
                    self._raise_gave_up(line)
                raise RuntimeError(
                    f"the group was not complete within {self._seconds:g} s: {why()}"
                )
            time.sleep(POLL_SECONDS)

    def _all_here(self) -> bool:
        for peer in self._absent():
            line = self._read(peer)
            if line.startswith(GAVE_UP):
                now, self._gave_up[peer] = time.monotonic(), line
                if now > self._retry_until.setdefault(peer, now + GRACE_SECONDS):
                    self._raise_gave_up(line)
            elif line:
                self._gave_up.pop(peer, None)
                self._lines[peer] = line
                self._addresses[peer] = parse_peer_address(peer, line)
                if self._addresses[peer].host == host_key():
                    self._peers.watch(peer, self._addresses[peer].pid)
        return len(self._lines) == self._size

    def _absent(self) -> list[int]:
        return [peer for peer in range(self._size) if peer not in self._lines]

    def _recheck_one(self) -> None:
        """One rank after the other: does its line still stand?"""
        if time.monotonic() < self._next_recheck:
            return
        self._next_recheck = time.monotonic() + RECHECK_SECONDS
        self._rechecked = (self._rechecked + 1) % self._size
        self.recheck(self._rechecked)

    def recheck(self, peer: int) -> None:
        """Read a rank's line once more; RuntimeError if the rank has given up since."""
        line = self._read(peer)
        if peer == self.rank or not line or self._lines.get(peer, line) == line:
            return
        if not line.startswith(GAVE_UP):
            raise RuntimeError(f"rank {peer} began anew while the group was formed")
        self._raise_gave_up(line)

    def _raise_gave_up(self, line: str) -> None:
        reason = line.removeprefix(GAVE_UP)[:500]
        self._reason = "".join(c if c.isprintable() else "?" for c in reason)
        raise RuntimeError(self._reason)

    def _key(self, rank: int) -> str:
        return f"{self._kind}/{rank}"

    def _read(self, peer: int) -> str:
        """A rank's line, empty when there is none: lines are emptied, never deleted.

        Reading a key that has been deleted would wait for the store's own timeout.
        """
        if not self._store.check([self._key(peer)]):
            return ""
        return self._store.get(self._key(peer)).decode(errors="replace")


def parse_peer_address(peer: int, line: str) -> PeerAddress:
    parts = LINE.fullmatch(line)
    if parts is None:
        raise RuntimeError(f"what the store holds for rank {peer} is not an address")
    return PeerAddress(parts[1], int(parts[2]), parts[3])


def host_key() -> str:
    """Equal where processes see each other: host, boot and PID namespace."""
    name = socket.gethostname().replace(" ", "-")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{name}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return name
