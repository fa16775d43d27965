"""A record of what a block did: chunks computed, messages issued and waited for.

    F attention compute 0.0 0.8    F dispatch issue 0.8 0.8    ...

The time of messages that nothing hides is the sum of the "wait" events.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

KINDS = ("compute", "issue", "wait")


class ChunkEvent(NamedTuple):
    """One thing that a rank did.

    Attributes:
        batch: the caller's name of the micro-batch: F and B in a pair.
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
    """Append what is done inside to `events`, if that is a list."""
    begin = time.perf_counter()
    yield
    if events is not None:
        events.append(ChunkEvent(batch, chunk, kind, begin, time.perf_counter()))


def exposed_seconds(events: Iterable[ChunkEvent]) -> float:
    """How long the rank was idle, waiting for messages."""
    return sum(e.end - e.begin for e in events if e.kind == "wait")
