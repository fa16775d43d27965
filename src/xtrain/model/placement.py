"""Which slice of each parameter a rank holds, and who sums its gradient.

    embed_tokens  lm_head         rows (vocabulary)   cut over "tensor"
    q_proj  gate_proj  up_proj    rows (outputs)      cut over "tensor"
    k_proj  v_proj                rows (heads)        cut, or a head on several ranks
    o_proj  down_proj             columns (inputs)    cut over "tensor"
    norms                         whole

Gradients are summed over "data" and "context" after backward: these ranks have other
tokens. Over "tensor" nothing is left to sum: the layers do that in backward, also for
what several ranks hold alike: norms, and key heads that are fewer than the ranks. Of
those ranks the first one's counts in the norm of all gradients, and one of them writes
it into a checkpoint.
"""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint.placement import Placement
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.attention import key_replicas

ROWS = {"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"}
KEYS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj"}
GRADIENT_AXES = ("data", "context")
"""Mesh axes over which the gradient of every parameter is summed after backward."""


def placement_of(name: str, config: XtrainConfig, rank: int, size: int) -> Placement:
    """Where the parameter `name` of rank `rank` of `size` tensor ranks is cut."""
    layer = name.split(".")[-2]
    if layer in ROWS:
        return Placement(0, rank, size)
    if layer in COLUMNS:
        return Placement(1, rank, size)
    if layer in KEYS:
        replicas = key_replicas(config.num_key_value_heads, size)
        first = rank % replicas == 0
        return Placement(0, rank // replicas, size // replicas, first)
    return Placement(is_first=rank == 0)


def axis_group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """The ranks of this one's axis; None for an axis that the mesh does not have."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return None
    return mesh[axis].get_group()


def axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """1 for an axis that the mesh does not have."""
    group = axis_group(mesh, axis)
    return 1 if group is None else group.size()


def mesh_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """All ranks of a mesh; None without a mesh.

    ValueError for a mesh of several axes that is not that of all ranks: it has no group
    of its own.
    """
    if mesh is None or mesh.ndim == 1:
        return None if mesh is None else mesh.get_group()
    check_whole_world(mesh)
    return dist.group.WORLD


def check_whole_world(mesh: DeviceMesh | None) -> None:
    """ValueError unless all ranks are in the mesh."""
    if mesh is not None and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"a mesh of {mesh.size()} ranks in a world of {dist.get_world_size()}: "
            "all ranks save, load and clip together"
        )
