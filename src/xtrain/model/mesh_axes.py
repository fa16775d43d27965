"""The axes of a model's mesh: their groups, and which of them the model is cut over."""

from math import prod

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.mesh import BATCH_AXES, axis_group, joined_group
from xtrain.model.config import XtrainConfig

AXES = {
    "pipeline": "XtrainModel.stages(config, mesh, schedule) makes the stages of a rank",
}
"""Axes over which a whole model cannot be cut, and what to call instead."""
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
    sizes = dict(zip(names, mesh.shape, strict=True))
    tensor = sizes.get("tensor", 1)
    if config.vocab_rows % tensor:
        rows = -(-config.vocab_size // tensor) * tensor
        raise ValueError(
            f"{config.vocab_rows} rows of the vocabulary are not divisible by "
            f"{tensor} tensor ranks: set padded_vocab_size={rows}"
        )
    check_expert_axes(sizes, config)


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
            f"num_local_experts={experts} on {ranks} expert ranks: must be divisible"
        )


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


def axes_group(mesh: DeviceMesh | None, axes: tuple[str, ...]) -> ProcessGroup | None:
    """The ranks of one or several axes. Every rank of the mesh calls it."""
    if mesh is None or len(axes) == 1:
        return axis_group(mesh, axes[0])
    above = prod(axis_size(mesh, axis) for axis in axes)
    if above == mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return joined_group(mesh, axes)


def groups_to_all(mesh: DeviceMesh | None) -> list[ProcessGroup]:
    """Groups that together connect all ranks of the mesh; data ranks first.

    They have the timeout of the mesh. Every rank of the mesh calls it.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    others = (axis_group(mesh, axis) for axis in names if axis not in BATCH_AXES)
    groups = [batch_group(mesh), *others]
    return [group for group in groups if group is not None and group.size() > 1]


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is rank 0 of an axis; True for one that the mesh does not have."""
    return group is None or group.rank() == 0


def mesh_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """All ranks of a mesh; None without a mesh.

    ValueError for a mesh of several axes and some of the ranks: it has no group.
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
