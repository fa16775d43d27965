"""Which rank is slow, and by how much: its own seconds beside those of the others.

    rank 0   |== busy ==|......... waits .........|      busy 0.4 s   waits 1.5 s
    rank 1   |============== busy ================|      busy 1.9 s   waits 0.0 s

A step takes all ranks the same time, as each waits for the slowest. So a rank counts
the seconds it waits in communication; what is left of a step is its own: computing,
reading data, or whatever holds its host up. This names the right rank on every axis,
also behind others in a pipeline, as a rank that is held up by another one waits.

A rank is slow if its own seconds are at least 1.5 times the median, and the difference
is at least a tenth of the step. Of an even number the lower median is taken: of two
ranks that is the faster one. A slow link makes all of its ranks wait, and names none.

Cost: see `xtrain.comm.waiting_time`; a gather of a few numbers every `every` steps. On
CUDA the host does not wait, so this is refused there.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.agreement import values_of_all
from xtrain.comm.waiting_time import WaitingTime
from xtrain.train.places import place_of

FACTOR = 1.5
SHARE = 0.1


class Seconds(NamedTuple):
    """Of one rank, a step, on average."""

    place: str
    busy: float
    """Its own, data among them."""
    waiting: float
    data: float
    """Waiting for its data."""


class Stragglers:
    """Measures the steps of this rank, until `close`; every rank makes one.

    Args:
        every: steps from one comparison to the next; None measures nothing.
        clock: see `WaitingTime`.

    Raises:
        ValueError: on every rank: the device is a GPU.
    """

    def __init__(
        self,
        every: int | None,
        mesh: DeviceMesh,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if every is not None and device.type != "cpu":
            raise ValueError(
                f"log.stragglers={every} on {device.type}: the host does not wait for "
                "communication there, so it is measured on cpu alone"
            )
        self.every, self.mesh, self.clock = every, mesh, clock
        self.waiting = WaitingTime(clock)
        self.steps, self.seconds, self.waited, self.data = 0, 0.0, 0.0, 0.0
        if every is not None:
            self.waiting.__enter__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What runs inside is one step, its data included."""
        begun, before = self.clock(), self.waiting.seconds
        yield
        self.seconds += self.clock() - begun
        self.waited += self.waiting.seconds - before
        self.steps += 1

    def compared(self, data: float) -> list[Seconds]:
        """Of all ranks, every `every` steps; empty between. Every rank calls it.

        Args:
            data: seconds that the loader has made this rank wait, in all.
        """
        if self.every is None or self.steps < self.every:
            return []
        parts = self.seconds - self.waited, self.waited, data - self.data
        place = place_of(self.mesh, socket.gethostname())
        mine = Seconds(place, *(part / self.steps for part in parts))
        self.steps, self.seconds, self.waited, self.data = 0, 0.0, 0.0, data
        return values_of_all(mine, None)

    def close(self) -> None:
        if self.every is not None:
            self.waiting.__exit__()


class Slow(NamedTuple):
    """A rank that is slow: its numbers for a log, and a line for a reader."""

    numbers: dict[str, float]
    text: str


def slow_ranks(ranks: Sequence[Seconds]) -> list[Slow]:
    """Those that are slow by the rule above, the slowest first.

    Args:
        ranks: of all, in order; or none.
    """
    if not ranks:
        return []
    usual = median_low([rank.busy for rank in ranks])
    step = max(rank.busy + rank.waiting for rank in ranks)
    waits = max(rank.waiting for rank in ranks)
    found = [
        of_slow(number, rank, usual, waits)
        for number, rank in enumerate(ranks)
        if rank.busy >= FACTOR * usual and rank.busy - usual >= SHARE * step
    ]
    return sorted(found, key=lambda slow: -slow.numbers["busy"])


def of_slow(number: int, rank: Seconds, usual: float, waits: float) -> Slow:
    """What is told of a slow rank, in seconds a step."""
    of_data = ""
    if rank.data >= SHARE * rank.busy:
        of_data = f", {rank.data:.2f} s of it for data"
    text = (
        f"{rank.place} is slow: busy {rank.busy:.2f} s a step{of_data}, the median is "
        f"{usual:.2f} s ({rank.busy / max(usual, 1e-9):.1f} times); others wait up to "
        f"{waits:.2f} s a step"
    )
    numbers = {"rank": number, "busy": rank.busy, "median": usual, "waiting": waits}
    return Slow(numbers, text)
