"""What a model refuses, before anything is computed or sent."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

AXES = {
    "pipeline": "XtrainModel.stages(config, mesh, schedule) makes the stages of a rank",
    "expert": "expert parallelism comes with lecture 7",
    "expert_data": "expert parallelism comes with lecture 7",
}
"""Axes that a whole model cannot be cut over, and what can or when it will be."""
CUT_OVER = ("data", "context", "tensor")


def check_mesh(mesh: DeviceMesh | None, also: tuple[str, ...] = ()) -> None:
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


def check_inputs(
    tokens: Tensor, labels: Tensor | None, positions: Tensor | None
) -> None:
    """ValueError unless the shapes and dtypes of a call fit each other."""
    if tokens.dim() != 2 or not _whole(tokens):
        raise ValueError(
            f"tokens {_described(tokens)} are not integers [batch, sequence]"
        )
    if labels is not None and not (labels.shape == tokens.shape and _whole(labels)):
        raise ValueError(
            f"labels {_described(labels)} are not integers of the tokens' shape "
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


def _described(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)} and {tensor.dtype}"
