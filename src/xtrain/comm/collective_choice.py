"""Whose collectives: torch's or ours, behind one set of names.

Code that takes `collectives=TORCH` runs on either, so that both can be raced and
compared on the same training step. All calls return a `Work`. Those of torch and DIRECT
are under way when they return, those of RING have finished; a ring has no all-to-all of
its own, so RING has DIRECT's.

A choice can be pickled, so a test hands it to its ranks as it is or by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.all_to_all import all_to_all_single_async
from xtrain.comm.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)
from xtrain.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from xtrain.comm.work import Work


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of parallel training, each returning a `Work`.

    all_reduce(tensor, op=SUM, group=None)
    all_gather(output, input, group=None)
    reduce_scatter(output, input, op=SUM, group=None)
    all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None,
                      group=None)

    All tensors must be contiguous, and stay untouched until the `Work` was waited for.
    """

    name: str
    all_reduce: Callable[..., Work]
    all_gather: Callable[..., Work]
    reduce_scatter: Callable[..., Work]
    all_to_all_single: Callable[..., Work]


def issue_async(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
    """Begin one of torch's collectives."""
    return Work([function(*args, **kwargs, async_op=True)], keep=args)


def run_to_end(function: Callable[..., None], *args: Any, **kwargs: Any) -> Work:
    """A call that is over when it returns."""
    function(*args, **kwargs)
    return Work()


# torch 2.13 renamed two of them; the old names warn there.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

TORCH = Collectives(
    "torch",
    partial(issue_async, dist.all_reduce),
    partial(issue_async, ALL_GATHER),
    partial(issue_async, REDUCE_SCATTER),
    partial(issue_async, dist.all_to_all_single),
)
RING = Collectives(
    "ring",
    partial(run_to_end, ring_all_reduce),
    partial(run_to_end, ring_all_gather),
    partial(run_to_end, ring_reduce_scatter),
    all_to_all_single_async,
)
DIRECT = Collectives(
    "direct",
    direct_all_reduce,
    direct_all_gather,
    direct_reduce_scatter,
    all_to_all_single_async,
)
CHOICES = {choice.name: choice for choice in (TORCH, RING, DIRECT)}


def collectives_named(name: str) -> Collectives:
    """TORCH, RING or DIRECT by its name."""
    if name not in CHOICES:
        raise ValueError(f"collectives {name!r} are not one of {list(CHOICES)}")
    return CHOICES[name]


def default_collectives(
    group: ProcessGroup | None, device: torch.device
) -> Collectives:
    """The default collectives of sharded training: torch's, and DIRECT on gloo.

    gloo has no reduce-scatter of its own: it runs a whole all-reduce and keeps a piece,
    which is twice the bytes.
    """
    on_gloo = "cpu:gloo" in dist.get_backend_config(group)
    return DIRECT if on_gloo and device.type == "cpu" else TORCH
