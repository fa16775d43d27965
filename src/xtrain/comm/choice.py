"""Whose collectives: torch's or ours, behind one set of names.

Code that takes `collectives=TORCH` runs on either, so that both can be raced and
compared on the same training step. All calls return a `Work`; torch's are under way
when they return, ours have finished.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)
from xtrain.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from xtrain.comm.work import Work


@dataclass(frozen=True, slots=True)
class Collectives:
    """The three collectives of data parallel training, each returning a `Work`.

    `all_reduce(tensor, group=...)`, `all_gather(output, input, group=...)` and
    `reduce_scatter(output, input, group=...)`; reductions are sums.
    """

    name: str
    all_reduce: Callable[..., Work]
    all_gather: Callable[..., Work]
    reduce_scatter: Callable[..., Work]


def _asynchronous(function: Callable[..., Any]) -> Callable[..., Work]:
    return lambda *tensors, group=None: Work(
        [function(*tensors, group=group, async_op=True)], keep=tensors
    )


def _at_once(function: Callable[..., None]) -> Callable[..., Work]:
    def call(*tensors: Any, group: Any = None) -> Work:
        function(*tensors, group=group)
        return Work()

    return call


# torch 2.13 renamed two of them; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

TORCH = Collectives(
    "torch",
    _asynchronous(dist.all_reduce),
    _asynchronous(_all_gather),
    _asynchronous(_reduce_scatter),
)
RING = Collectives(
    "ring",
    _at_once(ring_all_reduce),
    _at_once(ring_all_gather),
    _at_once(ring_reduce_scatter),
)
DIRECT = Collectives(
    "direct", direct_all_reduce, direct_all_gather, direct_reduce_scatter
)


def suited_to(group: ProcessGroup | None, device: torch.device) -> Collectives:
    """Whose collectives sharded training uses unless told: torch's, on gloo DIRECT.

    gloo has no reduce-scatter of its own: it runs a whole all-reduce and keeps a piece,
    which is twice the bytes.
    """
    on_gloo = "cpu:gloo" in dist.get_backend_config(group)
    return DIRECT if on_gloo and device.type == "cpu" else TORCH
