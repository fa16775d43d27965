"""Groups whose ranks make different numbers of calls, as inside DDP's `join()`.

A rank that has run out of inputs answers DDP's messages only. Any other call that asks
all ranks in every step is left out inside `join()`: it would deadlock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

_uneven: ContextVar[tuple[ProcessGroup | None, ...]] = ContextVar("uneven", default=())


@contextmanager
def uneven_calls(group: ProcessGroup | None) -> Iterator[None]:
    """Inside, this rank may make calls that others of the group do not."""
    group = group or dist.group.WORLD
    token = _uneven.set((*_uneven.get(), group))
    try:
        yield
    finally:
        _uneven.reset(token)


def has_uneven_calls(group: ProcessGroup | None) -> bool:
    """Whether this rank is inside `uneven_calls` of this group."""
    group = group or dist.group.WORLD
    return any(other is group for other in _uneven.get())
