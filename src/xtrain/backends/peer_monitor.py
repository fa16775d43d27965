"""When a wait is in vain, and why: a peer died, left, or does not come in time."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xtrain.backends.liveness import Peers
from xtrain.backends.operation import Operation
from xtrain.comm.transport_errors import PeersLost


class PeerMonitor:
    """Looks after the waits of one rank in one group.

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
        """Raise when `operation` waits in vain."""
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
        """End the group; whoever is stopped is named, it may be the cause."""
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
