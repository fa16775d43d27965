"""The other ranks of a group: whose process is alive, and which waits cannot end.

A pidfd becomes readable when its process has ended, for whatever reason; one system
call checks those of all peers. Without pidfds each peer is checked by its id. Peers on
other hosts are known by their connection: it is closed, or it stops answering the
system's probes.
"""

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xtrain.backends.operation import Operation
from xtrain.comm.transport_errors import PeersLost

STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "R": "running"}


class Peers:
    """The processes of a group's other ranks, as far as they run on this host."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self._asked: list[int] = []
        self._poll = select.poll()

    def watch(self, rank: int, pid: int) -> None:
        """Watch the process of `rank` from now on."""
        self.pids[rank] = pid
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._asked.append(rank)
            return
        self._descriptors[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        found = [self._descriptors[fd] for fd, _ in self._poll.poll(0)]
        found += [rank for rank in self._asked if self.state(rank) == "dead"]
        return sorted(found)

    def state(self, rank: int) -> str:
        """The state of a rank's process: "stopped", "running", ..."""
        pid = self.pids.get(rank)
        if pid is None:
            return "unknown"
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return "dead"
        except OSError:
            return "unknown"
        return STATES.get(letter, "waiting")

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._asked.clear()
        self._poll = select.poll()


class PeerMonitor:
    """Ends the waits of one rank in one group that cannot succeed.

    Args:
        transport: knows which ranks have come to the call, and which have left.
        seconds: the group's timeout, for calls that have none of their own.
        global_rank: the rank in the default group of a rank of this group.

    `broken` is the error that ended the group, None while it lives.
    """

    def __init__(
        self,
        rank: int,
        transport: Any,
        peers: Peers,
        seconds: float,
        global_rank: Callable[[int], int],
    ):
        self._rank, self._transport, self._peers = rank, transport, peers
        self.seconds, self._global_rank = seconds, global_rank
        self._first_seen_dead: float | None = None
        self.broken: RuntimeError | None = None

    def check(self, operation: Operation) -> None:
        """Raise when what `operation` waits for cannot come, or its time is up."""
        me = f"rank {self._global_rank(self._rank)} waited in {operation.call}"
        missing = self._transport.missing()
        left = {*self._transport.left()}
        died = [r for r in self._peers.dead() if r not in left]
        lost = self._transport.lost()
        dead = {*died, *lost}
        if dead:
            now = time.monotonic()
            self._first_seen_dead = self._first_seen_dead or now
            owed = operation.peers is not None or dead & {*missing}
            if (
                owed
                or now > self._first_seen_dead + self._transport.DEATH_GRACE_SECONDS
            ):
                how = "died" if died else "is gone (its connection ended)"
                gone = died or lost
                self._break(f"{self._names_of(gone)} {how} while {me}", gone)
        needed = missing if operation.peers is None else operation.peers
        gone = left & {*needed}
        # Of several possible senders one is enough.
        if gone and (operation.peers is None or gone == {*needed}):
            self._break(
                f"{self._names_of(sorted(gone))} left the group while {me}", gone
            )
        if operation.waited() > (operation.own_timeout() or self.seconds):
            where = "not there" if operation.peers is None else "nothing came from"
            if not needed:
                where, needed = "all are in this call", self._transport.others
            states = [
                f"rank {self._global_rank(r)} ({self._peers.state(r)})" for r in needed
            ]
            self._break(
                f"timed out: {me} for {operation.waited():.1f} s; "
                f"{where}: {', '.join(states)}"
            )

    def _break(self, why: str, gone: Iterable[int] = ()) -> None:
        """End the group; the error names stopped ranks, which may be the cause."""
        stopped = [
            r for r in self._transport.others if self._peers.state(r) == "stopped"
        ]
        untold = [r for r in stopped if f"{self._names_of([r])} (stopped)" not in why]
        if untold:
            why += f"; stopped: {self._names_of(untold)}"
        ranks = sorted(gone) or stopped
        self.broken = PeersLost(why, [self._global_rank(rank) for rank in ranks])
        raise self.broken

    def _names_of(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {self._global_rank(rank)}" for rank in ranks)
