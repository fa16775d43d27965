"""Which rows of a step's batch are being computed, for masks that all layouts share.

    batch of a step     0 1 2 3 4 5 6 7
    data rank 1                 4 5 6 7      begins at row 4
    its micro-batches           4 5|6 7      at rows 4 and 6

Dropout's mask is a function of the row's number in the whole batch, so that it does not
depend on who computes the row, nor in which micro-batch. Both are of a rank and of a
forward, which is why they are context variables: ranks may be threads, and a forward
that is recomputed in backward needs what it had.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

FIRST_ROW: ContextVar[int] = ContextVar("first_row", default=0)
"""The number of the first row of what is computed now."""
_BEGINS: ContextVar[tuple[int, ...]] = ContextVar("begins", default=())


@contextmanager
def rows_from(first: int) -> Iterator[None]:
    """What is computed inside begins at this row of the batch."""
    token = FIRST_ROW.set(first)
    try:
        yield
    finally:
        FIRST_ROW.reset(token)


@contextmanager
def micro_batches_begin(rows: Sequence[int]) -> Iterator[None]:
    """In a step inside, this rank's micro-batches begin at these rows of the batch."""
    token = _BEGINS.set(tuple(rows))
    try:
        yield
    finally:
        _BEGINS.reset(token)


@contextmanager
def in_micro_batch(number: int) -> Iterator[None]:
    """A forward of this micro-batch."""
    begins = _BEGINS.get()
    with rows_from(begins[number] if begins else FIRST_ROW.get()):
        yield
