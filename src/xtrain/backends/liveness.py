"""Who is still there: peers of this host watched through their process descriptors.

A pidfd becomes readable when its process is gone, however it went; looking at all peers
is one system call. Where the system has none, each peer is asked after by its id. For
peers on other hosts the connection must tell: it is closed, or it stops answering the
system's probes.
"""

import os
import select


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
        """What the system says of a rank's process: "stopped", "running", ..."""
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


STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "R": "running"}
