"""Device meshes: give every rank coordinates, and every axis its groups.

    shape (2, 4), axes ("data", "tensor")

              tensor 0  1  2  3
    data 0           0  1  2  3      rank 5 has coordinates (1, 1):
    data 1           4  5  6  7      its tensor group is [4, 5, 6, 7],
                                     its data group is [1, 5]

The last axis varies fastest, so its groups are neighbouring ranks: put the axis that
communicates most there. A mesh builds and names groups, and that is all it does: each
collective still gets its group: `ring_all_reduce(x, group=mesh["tensor"].get_group())`.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xtrain.comm.call_agreement import reduce_question
from xtrain.comm.checks import group_or_world, message_device

REPLICA_AXES = ("data", "expert_data")
"""Axes whose ranks hold the same parameters and bring other batches."""
BATCH_AXES = (*REPLICA_AXES, "expert")
"""Axes whose ranks bring other batches; those of "expert" hold different experts."""


def init_mesh(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    device_type: str | None = None,
    *,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """Build torch's DeviceMesh over the whole world; every rank must call it.

    Args:
        shape: size of each axis, outermost first; the product is the world size.
        axes: one name per axis.
        device_type: "cpu" or "cuda"; None for where tensors are made by default, or
            for where the default group's messages are.
        timeout: of each call in the mesh's groups; that of the default group if None.
    """
    world = dist.get_world_size()
    check_mesh(shape, axes, world)
    check_timeout(timeout)
    if device_type is None:
        device_type = torch.get_default_device().type
        if device_type == "cpu":
            device_type = message_device(None).type
    if device_type != "cpu":
        init_device_mesh(device_type, (world,))  # chooses this rank's GPU
    ranks = torch.arange(world, device="cpu").view(shape)
    groups = []
    for axis, size in enumerate(shape):
        if size == world and timeout is None:
            groups.append(group_or_world(None))
            continue
        limit = timeout or timeout_of(None)  # torch's own meshes take torch's default
        groups.append(groups_along(ranks, [axis], limit, axes[axis]))
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(axes))


def groups_along(
    ranks: Tensor, axes: list[int], timeout: timedelta | None, name: str
) -> ProcessGroup:
    """All groups of ranks that differ on these axes alone; returns this rank's.

    Every rank of the world makes every group, in the same order: torch numbers them.
    """
    size = math.prod(ranks.shape[axis] for axis in axes)
    last = list(range(-len(axes), 0))
    own = None
    for members in ranks.movedim(axes, last).reshape(-1, size).tolist():
        made = dist.new_group(members, timeout=timeout, group_desc=f"mesh_{name}")
        own = made if dist.get_rank() in members else own
    return group_or_world(own)


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """The timeout of a call in this group; None if its backend has no such option."""
    group = group_or_world(group)
    options = getattr(group._get_backend(message_device(group)), "options", None)
    return getattr(options, "_timeout", None)


def joined_group(mesh: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """The ranks of several axes, with the timeout of the first; every rank calls it.

    Made once for a mesh, which keeps its name.
    """
    known: dict[tuple[str, ...], Any] = mesh.__dict__.setdefault("_joined_groups", {})
    if axes not in known:
        parts = [mesh[axis].get_group() for axis in axes]
        timeout, name = timeout_of(parts[0]), "_".join(axes)
        if mesh.size() == dist.get_world_size():
            dims = [(mesh.mesh_dim_names or ()).index(axis) for axis in axes]
            group = groups_along(mesh.mesh, dims, timeout, name)
        else:
            ranks = mesh[axes].mesh.flatten().tolist()
            group = group_of_members(ranks, parts, timeout, f"mesh_{name}")
        known[axes] = group.group_name
    return dist.distributed_c10d._resolve_process_group(known[axes])


def group_of_members(
    ranks: list[int],
    parts: Sequence[ProcessGroup],
    timeout: timedelta | None,
    name: str | None = None,
) -> ProcessGroup:
    """A group that its members alone make; they reach one another through the parts.

    torch names it by its ranks and by the number of groups that a member holds, so
    members that hold different numbers would wait for ever: ValueError on all of them.
    """
    held = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([held, -held], device=message_device(parts[0]))
    for part in parts:
        reduce_question(counts, part, dist.ReduceOp.MAX)
    most, least = counts.tolist()
    if most != -least:
        raise ValueError(
            f"ranks {shorten(ranks)} hold {-least} to {most} process groups: a group "
            "that its members alone make needs the same number on each"
        )
    made = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, group_desc=name
    )
    return group_or_world(made)


def check_timeout(timeout: timedelta | None) -> None:
    """ValueError unless it is a time above 0, or None."""
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return
    raise ValueError(f"timeout is a timedelta above 0, or None, got {timeout!r}")


def check_mesh(shape: tuple[int, ...], axes: tuple[str, ...], world_size: int) -> None:
    """ValueError unless the axes are named and sized to hold exactly the world."""
    if len(shape) != len(axes) or len(set(axes)) != len(axes) or not shape:
        raise ValueError(f"mesh needs one name per axis: shape {shape}, axes {axes}")
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"mesh sizes must be whole numbers from 1 up, got {shape}")
    if math.prod(shape) != world_size:
        product = " x ".join(map(str, shape))
        raise ValueError(
            f"mesh {axes} = {product} = {math.prod(shape)} ranks, "
            f"but the world has {world_size}"
        )


def mesh_coordinates(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of `rank` on each axis: its digits; the last axis varies fastest."""
    if not 0 <= rank < math.prod(shape):
        raise ValueError(f"rank {rank} is not in a mesh of shape {shape}")
    coordinates = []
    for size in reversed(shape):
        coordinates.append(rank % size)
        rank //= size
    return tuple(reversed(coordinates))


def axis_ranks(rank: int, shape: tuple[int, ...], axis: int) -> list[int]:
    """The ranks that differ from `rank` on one axis alone: its group of that axis."""
    if not 0 <= axis < len(shape):
        raise ValueError(f"axis {axis} is not one of the {len(shape)} of shape {shape}")
    stride = math.prod(shape[axis + 1 :])
    first = rank - mesh_coordinates(rank, shape)[axis] * stride
    return [first + step * stride for step in range(shape[axis])]


def set_mesh(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Tell wrappers on which mesh a module's parameters are, see `mesh_of`."""
    for part in (module, *module.parameters()):
        part._xtrain_mesh = mesh  # type: ignore[assignment, attr-defined]


def mesh_of(held: nn.Module | Iterable[Tensor]) -> DeviceMesh | None:
    """The mesh of a module, or of parameters; None without `set_mesh`.

    An optimizer gets parameters alone, so `set_mesh` marks each of them. ValueError
    for parts of several meshes.
    """
    parts: list[nn.Module | Tensor]
    if isinstance(held, nn.Module):
        parts = [*held.modules(), *held.parameters()]
    else:
        parts = list(held)
    meshes = [getattr(part, "_xtrain_mesh", None) for part in parts]
    found = {id(mesh): mesh for mesh in meshes if mesh is not None}
    if len(found) > 1:
        raise ValueError(f"parameters of {len(found)} meshes: a wrapper has one mesh")
    return next(iter(found.values()), None)


def axis_group(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """The ranks of this one's axis; None for an axis that the mesh does not have."""
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return None
    return mesh.get_group(axis)


def replica_group(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The ranks that hold the same parameters, experts included, for other batches."""
    groups = [axis_group(mesh, axis) for axis in REPLICA_AXES]
    present = [group for group in groups if group is not None]
    return max(present, key=ProcessGroup.size, default=None)


def axes_of_ranks(mesh: DeviceMesh, ranks: list[int]) -> tuple[str, ...] | None:
    """The axes above 1 along which these global ranks lie; None unless they fill them.

    One rank alone lies along none.
    """
    places = [(mesh.mesh == rank).nonzero().tolist() for rank in ranks]
    if not all(places):
        return None
    names = mesh.mesh_dim_names or ()
    axes = [n for n in range(mesh.ndim) if len({place[0][n] for place in places}) > 1]
    whole = math.prod(mesh.size(n) for n in axes)
    return tuple(names[n] for n in axes) if len(ranks) == whole else None


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """The sizes of a mesh by axis, for messages."""
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return dict(zip(names, mesh.shape, strict=True))


def shorten(ranks: list[int]) -> str:
    """A list of ranks for messages: the first of many."""
    return str(ranks) if len(ranks) < 5 else f"{str(ranks[:4])[:-1]}, ...]"
