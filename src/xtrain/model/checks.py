"""What a model refuses before anything is computed or sent.

All ranks of a mesh make one model, so what it is made of is compared once:

    rank 0   config, options, mesh --+
    rank 1   config, options, mesh --+--> all-gather --> the same verdict

Weights are drawn from the seed and slices of one config: ranks with different values
would train a wrong model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.agreement import problem_of
from xtrain.comm.call_agreement import check_same_on
from xtrain.model.config import XtrainConfig


def check_same_config(
    config: XtrainConfig,
    mesh: DeviceMesh | None,
    options: Mapping[str, Any],
    problem: str | None = None,
) -> None:
    """ValueError on every rank unless all make the same model.

    Args:
        options: of the model; the device may differ.
        problem: what is wrong on this rank.
    """
    problem = problem_of(lambda: check_config(config)) or problem
    if mesh is None:
        if problem is not None:
            raise ValueError(problem)
        return
    dtype = options.get("dtype") or torch.get_default_dtype()
    said: dict[str, object] = {} if problem else fields_of(config)
    said |= {name: value for name, value in options.items() if name != "device"}
    said |= {"dtype": dtype, "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.shape)}"}
    check_same_on("models", groups_of(mesh), said, problem)


def check_config(config: object) -> None:
    if not isinstance(config, XtrainConfig):
        raise ValueError(f"config is a {type(config).__name__}, not an XtrainConfig")


def check_recompute(way: object, layers: object, *also: str) -> str | None:
    """What is wrong with the options `recompute` and `recomputed_layers`; `also` are
    further known ways."""
    ways = ("none", "selective", "layer", *also)
    whole = isinstance(layers, int) and not isinstance(layers, bool) and layers >= 0
    if layers is not None and not (whole and way == "layer"):
        return (
            f"recomputed_layers={layers!r} with recompute={way!r}: it is how many "
            'layers recompute="layer" computes again, 0 or more'
        )
    if way in ways:
        return None
    hint = '; XtrainModel.stages knows "stage"' if way == "stage" else ""
    return f"recompute={way!r} is not one of {', '.join(ways)}{hint}"


def fields_of(config: Any) -> dict[str, object]:
    """A config's values by name; those of a part after the part's name."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            parts = fields_of(value).items()
            found |= {f"{field.name}.{name}": part for name, part in parts}
        else:
            found[field.name] = value
    return found


def groups_of(mesh: DeviceMesh) -> list[ProcessGroup]:
    """Groups that together connect all ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]  # type: ignore[list-item]
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def check_inputs(
    tokens: Tensor,
    labels: Tensor | None,
    positions: Tensor | None,
    token_mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> None:
    """ValueError unless the shapes and dtypes of a call fit each other."""
    given = {"tokens": tokens, "labels": labels, "positions": positions}
    given |= {"token_mask": token_mask, "documents": documents}
    for name, value in given.items():
        missing = value is None and name != "tokens"
        if not missing and not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, not a tensor")
    if tokens.dim() != 2 or not _whole(tokens):
        raise ValueError(
            f"tokens {_described(tokens)} are not integers [batch, sequence]"
        )
    for name, ids in (("labels", labels), ("documents", documents)):
        if ids is not None and not (ids.shape == tokens.shape and _whole(ids)):
            raise ValueError(
                f"{name} {_described(ids)} are not integers of the tokens' shape "
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
