"""Which slice of each parameter a rank holds, and who sums its gradient.

    embed_tokens  lm_head         rows (vocabulary)   cut over "tensor"
    q_proj  gate_proj  up_proj    rows (outputs)      cut over "tensor"
    k_proj  v_proj                rows (heads)        cut, or a head on several ranks
    o_proj  down_proj             columns (inputs)    cut over "tensor"
    norms  router                 whole
    experts                       experts cut over "expert", and of each the rows of
                                  gate and up, the columns of down over "tensor"

Gradients are summed over "data" and "context" after backward: these ranks have other
tokens. Where there are experts, the data axis is two axes, "expert_data" and "expert":
those of everything but experts are summed over both, those of experts over
"expert_data" alone, as an expert has seen the tokens of all "expert" ranks. Over
"tensor" nothing is left to sum: the layers do that in backward, also for what several
ranks hold alike: norms, routers, and key heads that are fewer than the ranks. Of those
ranks the first one's counts in the norm of all gradients, and one of them writes it
into a checkpoint.
"""

from dataclasses import replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.mesh import BATCH_AXES, REPLICA_AXES, axis_group, joined_group
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.attention import key_replicas

ROWS = {"embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj"}
KEYS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj"}
EXPERT_DIMS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""The inner size of stacked experts; dim 0 counts experts."""
GRADIENT_AXES = (*REPLICA_AXES, "context", "expert")
"""Mesh axes over which gradients are summed after backward."""


def is_summed_over(name: str, axis: str) -> bool:
    """Whether the gradient of the parameter `name` is summed over this axis."""
    return axis in GRADIENT_AXES and not (axis == "expert" and is_of_experts(name))


def is_of_experts(name: str) -> bool:
    """Whether the parameter `name` is stacked experts."""
    return name.split(".")[-2] == "experts"


def placement_of(
    name: str,
    config: XtrainConfig,
    rank: int,
    size: int,
    expert_rank: int = 0,
    expert_size: int = 1,
) -> Placement:
    """Where the parameter `name` is cut, of one tensor rank and one expert rank."""
    if is_of_experts(name):
        within = Placement(EXPERT_DIMS[name.split(".")[-1]], rank, size)
        return Placement(0, expert_rank, expert_size, inner=within)
    place = tensor_placement(name, config, rank, size)
    return place if expert_rank == 0 else replace(place, is_first=False)


def tensor_placement(
    name: str, config: XtrainConfig, rank: int, size: int
) -> Placement:
    """Where a parameter that is not of experts is cut over tensor ranks."""
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


def axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """1 for an axis that the mesh does not have."""
    group = axis_group(mesh, axis)
    return 1 if group is None else group.size()


def batch_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The ranks that bring other batches: of "data", or of both axes of experts.

    None on a mesh that has none of them. Every rank of the mesh calls it.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    axes = [axis for axis in BATCH_AXES if axis in names]
    above = [axis for axis in axes if axis_size(mesh, axis) > 1]
    if mesh is None or len(above) < 2:
        return axis_group(mesh, (above or axes or ["data"])[0])
    return joined_group(mesh, tuple(above))


def groups_to_all(mesh: DeviceMesh | None) -> list[ProcessGroup]:
    """Groups through which all ranks of the mesh hear of each other; data ranks first.

    They have the timeout of the mesh. Every rank of the mesh calls it.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    others = (axis_group(mesh, axis) for axis in names if axis not in BATCH_AXES)
    groups = [batch_group(mesh), *others]
    return [group for group in groups if group is not None and group.size() > 1]


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is rank 0 of an axis; of one that the mesh does not have it is."""
    return group is None or group.rank() == 0


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
