"""Checks of the arguments of Muon on this rank."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from xtrain.checkpoint.pieces import Shard
from xtrain.comm import wrapper_rules
from xtrain.comm.wrapper_mesh import Over


def check_options(group: dict[str, Any]) -> None:
    """ValueError unless a group's options are within their ranges."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(
                f"{name}={group[name]} must not be negative and must be finite"
            )
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"adjust_lr_fn={group['adjust_lr_fn']!r} is neither 'original' nor "
            "'match_rms_adamw'"
        )
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not 0 <= steps < 100 or len(coefficients) != 3:
        raise ValueError(
            f"ns_steps={steps} must be from 0 to 99, and ns_coefficients="
            f"{coefficients} three numbers"
        )


def check_alone(groups: list[dict[str, Any]]) -> None:
    """ValueError unless one process can step these groups."""
    for group in groups:
        check_options(group)
        check_whole(group["params"])


def check_whole(parameters: list[Tensor]) -> None:
    """ValueError unless these are whole matrices, or stacks of them."""
    for parameter in parameters:
        shape = list(parameter.shape)
        if wrapper_rules.reduced(parameter).is_slice or parameter.dim() not in (2, 3):
            raise ValueError(
                f"a parameter of shape {shape} without a layout: Muon needs whole "
                "matrices, not slices, and not the flat shards of FSDP or "
                "ZeroOptimizer. Of sharded ones give it layout=matrix_layout(module)"
            )


def options_of(groups: list[dict[str, Any]]) -> dict[str, object]:
    """All groups' options by what they are called, and how many members each has."""
    return {
        f"{key} of group {number}": len(value) if key == "params" else value
        for number, group in enumerate(groups)
        for key, value in group.items()
    }


def check_all(
    groups: list[dict[str, Any]],
    known: Mapping[Tensor, Sequence[Shard]],
    over: Over | None,
    bucket_cap_mb: float,
) -> None:
    """ValueError unless these groups of a layout's parameters can be stepped."""
    wrapper_rules.check_options(bucket_cap_mb=bucket_cap_mb)
    for group in groups:
        check_options(group)
    parameters = [p for group in groups for p in group["params"]]
    if not any(p.requires_grad for p in parameters):
        raise ValueError("no parameter requires a gradient")
    check_matrices(parameters, known)
    check_reduction(parameters, over)


def check_matrices(
    parameters: list[Tensor], known: Mapping[Tensor, Sequence[Shard]]
) -> None:
    """ValueError unless all are matrices of the layout."""
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            raise ValueError("a DTensor: Muon takes plain parameters, as ours are")
        if parameter not in known:
            raise ValueError(
                f"a parameter {list(parameter.shape)} that layout does not have: make "
                "matrix_layout(module) of the module it is in, after wrapping"
            )
        for shard in known[parameter]:
            if len(shard.shape) not in (2, 3):
                raise ValueError(
                    f"{shard.name} {list(shard.shape)}: Muon steps matrices, or stacks "
                    "of matrices"
                )


def check_reduction(parameters: list[Tensor], over: Over | None) -> None:
    """ValueError unless Muon may reduce these gradients, if it is to."""
    if over is not None:
        over.check()
        wrapper_rules.check_options(over.reduction)
        wrapper_rules.check_bare(parameters, "Muon")
