"""Groups whose ranks make different numbers of calls, as inside DDP's `join()`.

A rank whose inputs are over answers the messages it knows of, those of DDP. Whatever
else would ask all ranks in every step must not do so there: it would wait for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup

_uneven: list[ProcessGroup | None] = []  # of this process


@contextmanager
def uneven_calls(group: ProcessGroup | None) -> Iterator[None]:
    """Inside, this rank may make calls that others of the group do not."""
    group = group or dist.group.WORLD
    _uneven.append(group)
    try:
        yield
    finally:
        _uneven.remove(group)


def has_uneven_calls(group: ProcessGroup | None) -> bool:
    """Whether this rank is inside `uneven_calls` of this group."""
    group = group or dist.group.WORLD
    return any(other is group for other in _uneven)
