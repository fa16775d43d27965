"""How the ranks of a shared-memory group map each other's segments.

Each rank tells the others the descriptor of its segment, and opens theirs through
/proc. What it finds there is believed once it shows the group's number and its owner's
rank: then its owner has read the same lines from the store, and mapped every segment.
"""

import contextlib

from xtrain.backends.rendezvous import PeerAddress, Rendezvous, host_key
from xtrain.backends.segments import JOINED, Segment, open_segment


class JoinSegments:
    """One rank's way to the segments of all ranks.

    Args:
        mine: this rank's own segment.
    """

    def __init__(self, rendezvous: Rendezvous, mine: Segment, rank: int, size: int):
        self._rendezvous, self._mine = rendezvous, mine
        self._rank, self._size = rank, size
        self._segments = {rank: mine}
        self._addresses: list[PeerAddress] = []
        self._number = 0  # of the group; the owner's rank is added to it

    def join(self, descriptor: int) -> list[Segment]:
        """The segments of all ranks, in rank order; `descriptor` is of this rank's.

        RuntimeError naming the ranks that are on another host or do not map in time.
        """
        addresses, group = self._rendezvous.exchange_addresses(str(descriptor))
        for peer, address in enumerate(addresses):
            if address.host != host_key():
                raise RuntimeError(
                    f"xtrain-shm: rank {peer} runs on another host than rank "
                    f"{self._rank}; shared memory serves one host, use "
                    '"xtrain-socket" across hosts'
                )
        self._addresses = addresses
        self._number = int.from_bytes(group[:7], "little") << 6
        self._rendezvous.wait_until(
            self._all_joined,
            lambda: f"ranks {self._absent()} did not map the memory of this group",
        )
        return [self._segments[peer] for peer in range(self._size)]

    @property
    def pids(self) -> list[int]:
        """The processes of all ranks."""
        return [address.pid for address in self._addresses]

    def _all_joined(self) -> bool:
        """Map what is there, and look who has mapped everything."""
        for peer, address in enumerate(self._addresses):
            if peer not in self._segments:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    self._segments[peer] = open_segment(
                        peer, address.pid, address.endpoint, self._size
                    )
        if len(self._segments) == self._size:
            self._mine.words[JOINED] = self._number + self._rank
            for peer, segment in self._segments.items():
                shown = segment.words[JOINED]  # once: it is set meanwhile
                if shown not in (0, self._number + peer):
                    raise RuntimeError(
                        f"xtrain-shm: what the store holds for rank {peer} leads to "
                        "memory of another rank or group, or it was given other lines"
                    )
        return not self._absent()

    def _absent(self) -> list[int]:
        return [
            peer
            for peer in range(self._size)
            if peer not in self._segments
            or self._segments[peer].words[JOINED] != self._number + peer
        ]
