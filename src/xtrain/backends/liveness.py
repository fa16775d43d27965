"""Who is still there: peers of this host watched through their process descriptors.

A pidfd becomes readable when its process is gone, however it went; looking at all peers
is one system call. Without pidfds (not Linux, another PID namespace) the transport's
own signs must do: a closed connection, or the time running out.
"""

import os
import select


class Peers:
    """The processes of a group's other ranks.

    Args:
        pids: rank -> process id, for the ranks on this host that are to be watched.
    """

    def __init__(self, pids: dict[int, int]):
        self.pids = pids
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll()
        for rank, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except (AttributeError, OSError):
                continue
            self._descriptors[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        return sorted(self._descriptors[fd] for fd, _ in self._poll.poll(0))

    def state(self, rank: int) -> str:
        """What the system says of a rank's process: "stopped", "running", ..."""
        try:
            with open(f"/proc/{self.pids[rank]}/stat") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except (OSError, KeyError):
            return "unknown"
        names = {
            "T": "stopped",
            "t": "stopped",
            "Z": "dead",
            "X": "dead",
            "R": "running",
        }
        return names.get(letter, "waiting")

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._poll = select.poll()
