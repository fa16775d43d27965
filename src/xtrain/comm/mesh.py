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

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_mesh(
    shape: tuple[int, ...], axes: tuple[str, ...], device_type: str = "cpu"
) -> DeviceMesh:
    """Build torch's DeviceMesh over the whole world; every rank must call it.

    Args:
        shape: size of each axis, outermost first; the product is the world size.
        axes: one name per axis.
    """
    check_mesh(shape, axes, dist.get_world_size())
    return init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(axes))


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
