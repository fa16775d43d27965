"""All ranks of a mesh make one model: what it is made of is compared once.

    rank 0   config, options, mesh --+
    rank 1   config, options, mesh --+--> all-gather --> the same verdict

Weights are drawn from the seed and slices of one config. Ranks with other values would
train, and the model would be wrong.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
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
    """Groups through which all ranks of a mesh hear of each other."""
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]  # type: ignore[list-item]
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]
