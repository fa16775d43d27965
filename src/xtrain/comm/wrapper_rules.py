"""Checks that all wrappers share, and the record of who reduces a gradient.

Each check is about this rank alone; `xtrain.comm.agreement` makes what it raises an
error on every rank. Each parameter has a record of who reduces its gradient, so that no
two wrappers do.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

WRAPPERS = ("xtrain.data_parallel", "xtrain.zero", "torch.nn.parallel")


def check_options(
    gradient_reduction: object = "average", bucket_cap_mb: Any = 1.0
) -> None:
    if gradient_reduction not in ("average", "sum"):
        raise ValueError(
            f"gradient_reduction={gradient_reduction!r} is neither average nor sum"
        )
    number = isinstance(bucket_cap_mb, (int, float))
    if not number or not 0 < bucket_cap_mb < math.inf or bucket_cap_mb is True:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb!r} must be a number of MiB, above 0 and "
            "finite"
        )


def check_filled(tensors: Iterable[tuple[str, Tensor]], device: object = None) -> None:
    """ValueError for tensors on meta, unless device="meta" asks for shapes alone."""
    if device not in (None, "meta"):
        raise ValueError(f'device={device!r} is not "meta": the module is on its own')
    for name, tensor in tensors:
        if tensor.is_meta and device is None:
            raise ValueError(
                f"{name} is on the meta device, so there are no values to copy to the "
                "other ranks: fill the module first, after module.to_empty(device=...)"
            )


Pieces = Callable[[], Mapping[nn.Parameter, Tensor]]
"""Gives, of each parameter, this rank's flat piece of its reduced gradient."""


@dataclass(slots=True)
class Reduced:
    """How the gradient of one parameter is reduced; the functions here read it."""

    owner: str | None = None
    """The wrapper that reduces it."""
    pieces: Pieces | None = None
    """Where the gradient is afterwards, unless in the parameter itself."""
    axes: tuple[str, ...] = ()
    """The mesh axes over which it is summed."""
    is_slice: bool = False
    """The parameter is cut over ranks of its own."""


def reduced(parameter: Tensor) -> Reduced:
    """The record of a parameter, which it keeps."""
    record: Reduced = parameter.__dict__.setdefault("_reduced", Reduced())
    return record


def claim(
    parameters: Iterable[Tensor],
    owner: str,
    pieces: Pieces | None = None,
    axes: tuple[str, ...] = (),
) -> None:
    """Record who reduces the gradients of these parameters, for `check_bare`."""
    for parameter in parameters:
        record = reduced(parameter)
        record.owner, record.pieces, record.axes = owner, pieces, axes


def owner_of(parameter: Tensor) -> str | None:
    """The wrapper that reduces the gradient of a parameter, by its name in `claim`."""
    return reduced(parameter).owner


def mark_as_summed(parameters: Iterable[Tensor], axes: tuple[str, ...]) -> None:
    """Record over which axes of their mesh these gradients are summed."""
    for parameter in parameters:
        reduced(parameter).axes = axes


def summed_over(parameter: Tensor) -> tuple[str, ...]:
    """The mesh axes over which a wrapper of ours sums the gradient of a parameter."""
    return reduced(parameter).axes


def check_counted(parameters: Iterable[Tensor]) -> None:
    """ValueError for shards over "context", which a norm of the model leaves out."""
    for parameter in parameters:
        if "context" in summed_over(parameter):
            raise ValueError(
                f"{owner_of(parameter)} shards over context ranks, of which the first "
                "counts in the norm of a model: wrap over data alone to clip"
            )


def pieces_of(parameters: Iterable[Tensor]) -> dict[nn.Parameter, Tensor]:
    """The pieces of those gradients that are not in the parameters themselves."""
    kept = dict.fromkeys(reduced(parameter).pieces for parameter in parameters)
    found: dict[nn.Parameter, Tensor] = {}
    for pieces in kept:
        found |= {} if pieces is None else pieces()
    return found


def mark_as_slices(parameters: Iterable[Tensor]) -> None:
    """Record that these are cut over ranks of their own, for `check_not_slices`."""
    for parameter in parameters:
        reduced(parameter).is_slice = True


def check_not_slices(parameters: Iterable[Tensor]) -> None:
    """ValueError if the norm of these is not that of the model they belong to."""
    if any(reduced(parameter).is_slice for parameter in parameters):
        raise ValueError(
            "these parameters are slices, cut over other ranks too, and their norm is "
            "not the model's: clip_grad_norm_(max_norm, module) counts each part once"
        )


def check_bare(parameters: Iterable[Tensor], owner: str) -> None:
    """ValueError if a wrapper of ours reduces some of these gradients already.

    With two that do, the numbers may come out right, but no memory is saved.
    """
    for parameter in parameters:
        other = owner_of(parameter)
        if other is not None:
            raise ValueError(
                f"{other} reduces the gradients of these parameters already, and "
                f"{owner} does that itself: give it the parameters of a bare module"
            )


def check_unwrapped(module: nn.Module, owner: str) -> None:
    """`check_bare`, also where a wrapper of torch's or ours is inside the module."""
    for part in module.modules():
        kind = type(part)
        if kind.__module__.startswith(WRAPPERS):
            raise ValueError(
                f"{kind.__module__}.{kind.__qualname__} reduces the gradients of this "
                f"module already, and {owner} does that itself: give it the bare module"
            )
    check_bare(module.parameters(), owner)
