"""Count a form's bytes: its collectives run as rings of sends and receives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from xtrain.cluster.per_rank import replaced
from xtrain.comm.collective_choice import RING


class _RingDistributed:
    """torch.distributed, but for the collectives that forms issue in a step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(
        self,
        tensor: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return RING.all_reduce(tensor, op, group)


def _call(collective: Any, *tensors: Any, group: Any = None, **_: Any) -> Any:
    return collective(*tensors, group=group)


@contextmanager
def ring_instead(module: ModuleType) -> Iterator[None]:
    """In here the form's module uses our ring collectives, whose bytes are exact."""
    rings = {
        "dist": _RingDistributed(),
        "_all_gather": partial(_call, RING.all_gather),
        "_reduce_scatter": partial(_call, RING.reduce_scatter),
    }
    with ExitStack() as stack:
        for name in rings.keys() & vars(module).keys():
            stack.enter_context(replaced(module, name, rings[name]))
        yield
