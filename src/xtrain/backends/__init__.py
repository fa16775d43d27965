"""lc1: torch.distributed backends in Python: over shared memory, over sockets, and one
that keeps NCCL's rules on CPUs ("nccl-rules").

Importing this package makes them known to torch:

    import xtrain.backends

    dist.init_process_group("xtrain-shm")

There is no entry point "torch.backends", by which torch would find them on its own: it
would load xtrain into every program that imports torch.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from xtrain.backends.nccl_rules.board import NcclDeadlock
from xtrain.backends.nccl_rules.group import NcclRulesGroup, make_transport
from xtrain.backends.nccl_rules.rules import NcclRuleError
from xtrain.backends.peers import Peers
from xtrain.backends.process_group import XtrainProcessGroup
from xtrain.backends.shared_memory import SharedMemory
from xtrain.backends.sockets import Sockets

__all__ = ["NcclDeadlock", "NcclRuleError", "register", "shared_empty"]

MakeTransport = Callable[[Store, int, int, float, Peers], Any]
BACKENDS: dict[str, tuple[MakeTransport, type[XtrainProcessGroup]]] = {
    "xtrain-shm": (SharedMemory, XtrainProcessGroup),
    "xtrain-socket": (Sockets, XtrainProcessGroup),
    "nccl-rules": (make_transport, NcclRulesGroup),
}


def register() -> None:
    """Make the backends known to torch: `dist.init_process_group("xtrain-shm")`.

    Importing `xtrain.backends` has done so already; doing it again does no harm.
    """
    for name, (transport, group) in BACKENDS.items():
        register_variant(name, transport, group)


def register_variant(
    name: str,
    transport: MakeTransport,
    group: type[XtrainProcessGroup] = XtrainProcessGroup,
) -> None:
    """Make a backend known to torch under this name, unless it is already."""
    if name.upper() not in dist.Backend._plugins:
        create = partial(_create, name, transport, group)
        dist.Backend.register_backend(name, create, devices=["cpu"])
    # torch 2.15's flight recorder asks every group for its backend in C++, of which
    # these have none, unless the backend is listed as recording itself.
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorders is not None:
        recorders.add(name)


def shared_empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """An uninitialized tensor in memory that all ranks of a group see.

    A collective: every rank of the group calls it, with the same shape and dtype. On
    such a tensor, or the same part of it on all ranks, `dist.all_reduce` works in
    place: large ones are copied into no stage. To everything else it is a tensor like
    any other, and its memory is given back when it is used no more.

    Args:
        size: like torch.empty's, numbers or one sequence of them.
        group: on the backend "xtrain-shm"; None is the default group.

    Raises ValueError for a group on another backend, RuntimeError on every rank when a
    rank has no memory left or asks for another shape or dtype.
    """
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if not isinstance(group, XtrainProcessGroup):
        raise ValueError(
            f'shared_empty: needs a group on "xtrain-shm", not on {group.name()}'
        )
    like = torch.empty(*size, dtype=dtype, device="meta")  # type: ignore[arg-type]
    return group.shared_empty(like.shape, like.dtype)


def _create(
    name: str,
    transport: MakeTransport,
    group: type[XtrainProcessGroup],
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
) -> XtrainProcessGroup:
    return group(name, transport, store, rank, size, timeout)


register()
