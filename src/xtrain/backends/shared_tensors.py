"""Tensors that live in shared memory: an all-reduce works on them where they are.

    t = xtrain.backends.shared_empty(1024, 1024)     # every rank, like a collective
    dist.all_reduce(t)                               # no stage, no copies into it

torch's symmetric memory is the same idea for GPUs (`symm_mem.empty`, `rendezvous`):
every rank allocates alike, and maps those of all.
"""

import errno
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xtrain.backends.call_runner import CallRunner
from xtrain.backends.calls import in_words
from xtrain.backends.segments import make_memory, open_memory

OFFSET_BITS = 44  # of a byte in a shared tensor; above them the tensor's number


@dataclass(frozen=True, slots=True)
class Shared:
    """One tensor of every rank: their bytes by rank, None for this rank's own."""

    address: int
    nbytes: int
    views: list[Tensor | None]


class SharedTensors:
    """The shared tensors of one rank in one group that are still in use.

    Ranks number them alike, because making one is a collective. When this rank's tensor
    and all its views are gone, so are its views of the others'.
    """

    def __init__(self, rank: int, pids: Sequence[int]):
        self._rank, self._pids = rank, pids
        self._made = 0
        self._living: dict[int, Shared] = {}

    def map(
        self, descriptors: Sequence[int], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """This rank's tensor; descriptors[r] is that of rank r in its process."""
        self._made += 1
        nbytes = bytes_for(shape, dtype)
        views: list[Tensor | None] = []
        for peer, descriptor in enumerate(descriptors):
            if peer == self._rank:
                own = mmap.mmap(descriptor, nbytes)
                views.append(None)
                continue
            opened = open_memory(peer, self._pids[peer], str(descriptor), nbytes)
            try:
                views.append(
                    torch.frombuffer(mmap.mmap(opened, nbytes), dtype=torch.uint8)
                )
            finally:
                os.close(opened)
        tensor = torch.frombuffer(own, dtype=dtype)[: math.prod(shape)]
        self._living[self._made] = Shared(tensor.data_ptr(), nbytes, views)
        # torch keeps the mapping for as long as the tensor or a view of it is used.
        weakref.finalize(own, self._living.pop, self._made, None).atexit = False
        return tensor.view(shape)

    def locate(self, flat: Tensor) -> int:
        """A number for where in which shared tensor this one lies; 0 for nowhere."""
        for number, shared in self._living.items():
            offset = flat.data_ptr() - shared.address
            if 0 <= offset < shared.nbytes:
                return number << OFFSET_BITS | offset
        return 0

    def at(self, location: int, flat: Tensor) -> list[Tensor]:
        """The tensors of all ranks at a location that looks like `flat` on each."""
        shared = self._living[location >> OFFSET_BITS]
        start = location & (1 << OFFSET_BITS) - 1
        stop = start + flat.numel() * flat.element_size()
        return [
            flat if view is None else view[start:stop].view(flat.dtype)
            for view in shared.views
        ]

    def clear(self) -> None:
        self._living.clear()


def make_shared(runner: CallRunner, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Reserve this rank's tensor and map those of the others; see `shared_empty`."""
    shared = getattr(runner.transport, "shared", None)
    if shared is None:
        raise ValueError(
            f'shared_empty: needs a group on "xtrain-shm", not on {runner.backend}'
        )
    descriptor = -1
    error: Exception | None = None
    try:
        descriptor = reserve(shape, dtype)
    except OSError as problem:
        error = problem
    try:
        descriptors = runner.exchange("shared_empty", (shape, dtype), descriptor)
        if -1 not in descriptors:
            try:
                tensor = shared.map(descriptors, shape, dtype)
            except (OSError, RuntimeError, ValueError) as problem:
                error = problem
        fine = runner.exchange("shared_empty", None, error is None)
    finally:
        if descriptor != -1:
            os.close(descriptor)  # all ranks have mapped it
    if 0 in fine:
        failed = runner.global_rank(fine.index(0))
        raise RuntimeError(
            f"shared_empty: rank {failed} has no memory for {in_words((shape, dtype))}"
        ) from error
    return tensor


def reserve(shape: torch.Size, dtype: torch.dtype) -> int:
    """A descriptor of memory for such a tensor; OSError when it is not to be had.

    The system hands pages out when they are written, and kills who writes more than
    there are. So more than is there is refused now.
    """
    nbytes = bytes_for(shape, dtype)
    if nbytes > available_bytes():
        raise OSError(errno.ENOMEM, f"{nbytes} bytes are not available")
    return make_memory(nbytes)


def available_bytes() -> int:
    """Memory that the system can hand out without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # unknown


def bytes_for(shape: torch.Size, dtype: torch.dtype) -> int:
    """Whole elements of any dtype, and never none."""
    return math.prod(shape) * dtype.itemsize // 16 * 16 + 16
