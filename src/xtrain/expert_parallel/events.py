"""A list of what a block did: chunks that computed, messages issued and waited for.

    F attention compute 0.0 0.8    F dispatch issue 0.8 0.8    ...

What a rank waits for, unhidden, is the sum of its "wait" events.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

KINDS = ("compute", "issue", "wait")


class ChunkEvent(NamedTuple):
    """One thing that a rank did.

    Attributes:
        batch: which micro-batch, by a word of the caller's: F and B in a pair.
        chunk: attention, shared, counts, dispatch, mlp, combine.
        kind: compute, issue or wait.
        begin, end: by `time.perf_counter`.
    """

    batch: str
    chunk: str
    kind: str
    begin: float
    end: float

    @property
    def name(self) -> str:
        """Without its time."""
        return f"{self.kind} {self.batch} {self.chunk}"


@contextmanager
def event(
    events: list[ChunkEvent] | None, batch: str, chunk: str, kind: str
) -> Iterator:
    """What is done inside becomes one of `events`, if there is a list."""
    begin = time.perf_counter()
    yield
    if events is not None:
        events.append(ChunkEvent(batch, chunk, kind, begin, time.perf_counter()))


def exposed_seconds(events: Iterable[ChunkEvent]) -> float:
    """How long the rank waited for messages and did nothing else."""
    return sum(e.end - e.begin for e in events if e.kind == "wait")
