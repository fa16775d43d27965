"""How the ranks of a new group find each other, and notice who is lost on the way.

Each rank puts one line into torch's store (where its process is, how to reach it) and
reads everybody else's. The store is not authenticated: these lines are hints, what they
lead to must prove itself.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

from xtrain.backends.liveness import Peers

POLL_SECONDS = 0.001


class Disagreement(Exception):
    """The ranks stand in different calls."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank says of itself."""

    host: str
    pid: int
    address: str


def meet(
    store: Store, kind: str, rank: int, size: int, address: str, seconds: float,
    peers: Peers,
) -> tuple[list[Entry], bytes]:  # fmt: skip
    """Exchange addresses; the entries in rank order and a digest of them all.

    The digest names the group: random numbers of all ranks are in it. Processes of this
    host are watched by `peers` from now on. Raises RuntimeError when one of them dies,
    or when `seconds` are over, naming the ranks.
    """
    mine = f"{host_key()} {os.getpid()} {secrets.token_hex(16)} {address}"
    store.set(f"{kind}/{rank}", mine)
    lines: dict[int, str] = {}
    entries: dict[int, Entry] = {}

    def all_here() -> bool:
        for peer in range(size):
            if peer not in lines and store.check([f"{kind}/{peer}"]):
                lines[peer] = store.get(f"{kind}/{peer}").decode(errors="replace")
                entries[peer] = read_entry(peer, lines[peer])
                if peer != rank and entries[peer].host == host_key():
                    peers.watch(peer, entries[peer].pid)
        return len(lines) == size

    wait_until(
        all_here, peers, seconds,
        lambda: f"nothing was heard from ranks {sorted({*range(size)} - {*lines})}",
    )  # fmt: skip
    everything = "\n".join(lines[peer] for peer in range(size))
    digest = hashlib.sha256(everything.encode()).digest()
    return [entries[peer] for peer in range(size)], digest


def forget(store: Store, kind: str, rank: int) -> None:
    """Take this rank's line back once everybody has read it."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"{kind}/{rank}")


def read_entry(peer: int, line: str) -> Entry:
    parts = line.split(" ")
    if len(parts) != 4 or not parts[1].isdecimal():
        raise RuntimeError(f"what the store holds for rank {peer} is no address")
    return Entry(parts[0], int(parts[1]), parts[3])


def wait_until(
    ready: Callable[[], bool], peers: Peers, seconds: float, why: Callable[[], str]
) -> None:
    """Poll `ready`; RuntimeError when a peer dies or the time is over."""
    end = time.monotonic() + seconds
    while not ready():
        dead = peers.dead()
        if dead and not ready():
            names = ", ".join(f"rank {peer}" for peer in dead)
            raise RuntimeError(f"{names} died while the group was being formed")
        if time.monotonic() > end:
            raise RuntimeError(
                f"the group was not complete within {seconds:g} s: {why()}"
            )
        time.sleep(POLL_SECONDS)


def host_key() -> str:
    """Equal where processes see each other: host, boot and PID namespace."""
    name = socket.gethostname().replace(" ", "-")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{name}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return name
