"""Memory that the ranks of one host all see: one segment a rank, mapped by all.

    segment of a rank
      words       arrived: how many steps this rank has completed; the fingerprint of
                  its call; how far its channels are written and read
      text        the description of its call, should the ranks disagree
      stage 0, 1  its share of a step, in turns: one step can be written while slow
                  readers still finish the one before
      channels    a ring of bytes to each peer, for point-to-point messages

Segments are anonymous memory (memfd), reached through the owner's /proc entry: the
kernel lets in the same user only, and when the last process is gone so is the memory.
"""

import mmap
import os
import platform
import re
import threading

import torch
from torch import Tensor

from xtrain.backends.rendezvous import Rendezvous, host_key

MAX_RANKS = 64
STAGE_BYTES = 2 << 20  # the stages of four ranks stay in a shared cache
CHANNEL_BYTES = 1 << 20
SHOWN_BYTES = 128 << 10  # written or read at a time, so that both sides copy at once

# Words of a segment, by index; the channels' counters follow.
ARRIVED = 0
LEFT = 1
DESCRIBED = 2
JOINED = 3
FINGERPRINT = 4  # this and SIDEBAND: two words each, of even and odd steps in turns
SIDEBAND = 6
WRITTEN = 64
READ = 64 + MAX_RANKS
# Of an all-to-all, two steps.
SEND_COUNTS = 64 + 2 * MAX_RANKS
RECV_COUNTS = 64 + 4 * MAX_RANKS
TEXT_OFFSET = 4096
TEXT_BYTES = 4096
STAGE_OFFSET = TEXT_OFFSET + TEXT_BYTES
CHANNEL_OFFSET = STAGE_OFFSET + 2 * STAGE_BYTES


class Segment:
    """One rank's memory, seen from any rank."""

    def __init__(self, descriptor: int, size: int):
        length = length_for(size)
        self.map = mmap.mmap(descriptor, length)
        self.bytes = memoryview(self.map)
        self.words = self.bytes[:TEXT_OFFSET].cast("Q")
        everything = torch.frombuffer(self.map, dtype=torch.uint8)
        stages = everything[STAGE_OFFSET:CHANNEL_OFFSET]
        self._stages = stages.view(2, STAGE_BYTES)
        self._typed: dict[tuple[int, torch.dtype], Tensor] = {}

    def stage(self, step: int, dtype: torch.dtype) -> Tensor:
        """The stage of a step as a flat tensor of `dtype`."""
        key = (step % 2, dtype)
        if key not in self._typed:
            self._typed[key] = self._stages[step % 2].view(dtype)
        return self._typed[key]

    def channel(self, peer: int) -> memoryview:
        start = CHANNEL_OFFSET + peer * CHANNEL_BYTES
        return self.bytes[start : start + CHANNEL_BYTES]


class Channel:
    """A ring of bytes from one rank to another: counters of bytes written and read."""

    def __init__(self, owner: Segment, source: int, reader: Segment, target: int):
        self._ring = owner.channel(target)
        self._written, self._read = owner.words, reader.words
        self._w, self._r = WRITTEN + target, READ + source

    def write(self, data: memoryview) -> int:
        written, read = self._written[self._w], self._read[self._r]
        start = written % CHANNEL_BYTES
        room = CHANNEL_BYTES - (written - read)
        count = min(data.nbytes, room, CHANNEL_BYTES - start, SHOWN_BYTES)
        if count:
            self._ring[start : start + count] = data[:count]
            fence()
            self._written[self._w] = written + count
        return count

    def read(self, into: memoryview) -> int:
        written, read = self._written[self._w], self._read[self._r]
        if written == read:
            return 0
        start = read % CHANNEL_BYTES
        count = min(into.nbytes, written - read, CHANNEL_BYTES - start, SHOWN_BYTES)
        if count:
            fence()
            into[:count] = self._ring[start : start + count]
            fence()
            self._read[self._r] = read + count
        return count


def length_for(size: int) -> int:
    """Bytes of a segment; memory that is never touched costs nothing."""
    return CHANNEL_OFFSET + size * CHANNEL_BYTES


def open_segment(peer: int, pid: int, descriptor: str, size: int) -> Segment:
    """Map a peer's segment: anonymous memory of the right size made by this user."""
    opened = open_memory(peer, pid, descriptor, length_for(size))
    try:
        return Segment(opened, size)
    finally:
        os.close(opened)


def join_segments(
    rendezvous: Rendezvous, mine: Segment, descriptor: int, rank: int, size: int
) -> tuple[list[Segment], list[int]]:
    """The segments and the processes of all ranks, in rank order.

    Each rank tells the others the descriptor of its segment, and opens theirs through
    /proc. A segment is believed once it shows the group's number and its owner's rank:
    then its owner has read the same lines from the store, and mapped every segment.

    RuntimeError naming the ranks that are on another host or do not map in time.
    """
    addresses, group = rendezvous.exchange_addresses(str(descriptor))
    for peer, address in enumerate(addresses):
        if address.host != host_key():
            raise RuntimeError(
                f"xtrain-shm: rank {peer} runs on another host than rank {rank}; "
                'shared memory serves one host, use "xtrain-socket" across hosts'
            )
    number = int.from_bytes(group[:7], "little") << 6  # the owner's rank is added
    segments = {rank: mine}

    def absent() -> list[int]:
        return [
            peer
            for peer in range(size)
            if peer not in segments or segments[peer].words[JOINED] != number + peer
        ]

    def all_joined() -> bool:
        """Map what is there, and look who has mapped everything."""
        for peer, address in enumerate(addresses):
            if peer not in segments:
                try:
                    segments[peer] = open_segment(
                        peer, address.pid, address.endpoint, size
                    )
                except (FileNotFoundError, ProcessLookupError):
                    pass
                except RuntimeError:
                    # a rank that gave up has closed it: the number may be reused
                    rendezvous.recheck(peer)
                    raise
        if len(segments) == size:
            mine.words[JOINED] = number + rank
            for peer, segment in segments.items():
                shown = segment.words[JOINED]  # read once: it is set meanwhile
                if shown not in (0, number + peer):
                    raise RuntimeError(
                        f"xtrain-shm: what the store holds for rank {peer} leads to "
                        "memory of another rank or group, or it was given other lines"
                    )
        return not absent()

    rendezvous.wait_until(
        all_joined, lambda: f"ranks {absent()} did not map the memory of this group"
    )
    return [segments[peer] for peer in range(size)], [each.pid for each in addresses]


def make_memory(nbytes: int) -> int:
    """A descriptor of anonymous memory, all zero."""
    descriptor = os.memfd_create("xtrain", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_memory(peer: int, pid: int, descriptor: str, nbytes: int) -> int:
    """A descriptor of memory that a peer has made, or RuntimeError."""
    if not re.fullmatch(r"[0-9]{1,9}", descriptor):
        raise RuntimeError(f"what the store holds for rank {peer} is not an address")
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise  # it has gone, for a reason that others know
    except OSError as error:
        raise RuntimeError(
            f"xtrain-shm: the memory of rank {peer} cannot be opened: {error}"
        ) from error
    name, status = os.readlink(f"/proc/self/fd/{opened}"), os.fstat(opened)
    if (
        name.startswith("/memfd:xtrain ")
        and status.st_uid == os.geteuid()
        and status.st_size == nbytes
    ):
        return opened
    os.close(opened)
    raise RuntimeError(
        f"xtrain-shm: what the store holds for rank {peer} leads to {name} "
        f"of user {status.st_uid}, {status.st_size} bytes: no segment of ours"
    )


_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")
_lock = threading.Lock()


def fence() -> None:
    """Have stores before it seen before stores after it.

    x86 keeps their order by itself; elsewhere taking a lock makes the processor do it.
    """
    if not _KEEPS_ORDER:
        with _lock:
            pass
