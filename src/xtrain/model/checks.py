"""What a model refuses, before anything is computed or sent."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.model.config import XtrainConfig

AXES = {
    "pipeline": "XtrainModel.stages(config, mesh, schedule) makes the stages of a rank",
}
"""Axes that a whole model cannot be cut over, and what can."""
EXPERT_AXES = ("expert_data", "expert")
CUT_OVER = ("data", *EXPERT_AXES, "context", "tensor")


def check_mesh(
    mesh: DeviceMesh | None, config: XtrainConfig, also: tuple[str, ...] = ()
) -> None:
    """ValueError for an axis above 1 over which the model cannot be cut.

    Args:
        also: axes over which it can be cut, besides `CUT_OVER`.
    """
    if mesh is None:
        return
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    for axis, size in zip(names, mesh.shape, strict=True):
        if size > 1 and axis not in (*CUT_OVER, *also):
            known = ", ".join((*CUT_OVER, *AXES))
            hint = AXES.get(axis, f"known axes are {known}")
            raise ValueError(
                f"mesh axis {axis!r} has size {size}, but this model cannot be cut "
                f"over it: {hint}"
            )
    check_expert_axes(dict(zip(names, mesh.shape, strict=True)), config)


def check_expert_axes(sizes: dict[str, int], config: XtrainConfig) -> None:
    """ValueError unless a mesh with these axes may have expert ranks."""
    above = [axis for axis in EXPERT_AXES if sizes.get(axis, 1) > 1]
    if not above:
        return
    if not config.num_local_experts:
        raise ValueError(
            f"mesh axis {above[0]!r} has size {sizes[above[0]]}, but this model has no "
            'experts, num_local_experts=0: its data axis is "data"'
        )
    if sizes.get("data", 1) > 1:
        raise ValueError(
            f"mesh axes 'data' and {above[0]!r}: with experts the data axis is "
            'written as ("expert_data", "expert"), and never together with "data"'
        )
    experts, ranks = config.num_local_experts, sizes.get("expert", 1)
    if experts % ranks:
        raise ValueError(
            f"num_local_experts={experts} on {ranks} expert ranks: each needs as many "
            "as the others"
        )


def check_inputs(
    tokens: Tensor,
    labels: Tensor | None,
    positions: Tensor | None,
    token_mask: Tensor | None = None,
) -> None:
    """ValueError unless the shapes and dtypes of a call fit each other."""
    given = {"tokens": tokens, "labels": labels, "positions": positions}
    for name, value in (given | {"token_mask": token_mask}).items():
        missing = value is None and name != "tokens"
        if not missing and not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, not a tensor")
    if tokens.dim() != 2 or not _whole(tokens):
        raise ValueError(
            f"tokens {_described(tokens)} are not integers [batch, sequence]"
        )
    if labels is not None and not (labels.shape == tokens.shape and _whole(labels)):
        raise ValueError(
            f"labels {_described(labels)} are not integers of the tokens' shape "
            f"{list(tokens.shape)}"
        )
    masks = token_mask is None or (
        token_mask.shape == tokens.shape and token_mask.dtype == torch.bool
    )
    if not masks:
        raise ValueError(
            f"token_mask {_described(token_mask)} is not bool of the tokens' shape "
            f"{list(tokens.shape)}"
        )
    shapes = (tokens.shape, tokens.shape[1:])
    if positions is not None and not (positions.shape in shapes and _whole(positions)):
        raise ValueError(
            f"positions {_described(positions)} are not integers of shape "
            f"{list(shapes[1])} or {list(shapes[0])}"
        )


def _whole(ids: Tensor) -> bool:
    return ids.dtype in (torch.int64, torch.int32)


def _described(tensor: Any) -> str:
    return f"of shape {list(tensor.shape)} and {tensor.dtype}"
