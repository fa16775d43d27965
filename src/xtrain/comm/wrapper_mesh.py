"""Over which ranks a wrapper reduces: what it is told, and what the model's mesh knows.

    mesh ("data", "tensor")          0 1      "data" groups [0, 2] and [1, 3] hold the
                                     2 3      same slices and bring other batches

Parameters that are cut over some axes of a mesh are the same on the ranks of others,
and only those may copy and sum them. A model on a mesh divides its loss by the count of
all ranks, so that its gradients are sums.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.mesh import (
    REPLICA_AXES,
    axes_of_ranks,
    mesh_of,
    replica_group,
)

SUMMED_AXES = (*REPLICA_AXES, "context")
"""Axes whose ranks hold the same parameters, so that a wrapper may be over them."""


class Over(NamedTuple):
    """How a wrapper reduces: its ranks, "sum" or "average", the axes of the mesh."""

    group: ProcessGroup | None
    reduction: str
    axes: tuple[str, ...] = ()
    problem: str | None = None
    """What is wrong with what the wrapper was given."""

    def check(self) -> None:
        """ValueError if there is a problem."""
        if self.problem is not None:
            raise ValueError(self.problem)


def ranks_to_reduce(
    held: nn.Module | Iterable[Tensor],
    group: ProcessGroup | None,
    reduction: str | None,
) -> Over:
    """What a wrapper was given, completed from the mesh of what it wraps.

    With a `problem` the group is that of the mesh, whose ranks tell each other.

    Args:
        group: None for all ranks, or for the replicas that the mesh names.
        reduction: None for "average", or for "sum" on a mesh.
    """
    try:
        mesh = mesh_of(held)
    except ValueError as error:
        return Over(group, reduction or "average", problem=str(error))
    if mesh is None:
        return Over(group, reduction or "average")
    replicas = replica_group(mesh) or alone()
    problem = wrong_group(mesh, group)
    if problem is None and reduction == "average":
        problem = (
            "gradient_reduction='average' of a model on a mesh: its loss is divided by "
            "the count of all ranks, so gradients are summed: 'sum', or leave it out"
        )
    chosen = replicas if problem or group is None else group
    axes = axes_of_ranks(mesh, dist.get_process_group_ranks(chosen)) or ()
    return Over(chosen, reduction or "sum", axes, problem)


def wrong_group(mesh: DeviceMesh, group: ProcessGroup | None) -> str | None:
    """What is wrong with a group to reduce over; None for what the mesh allows."""
    if not isinstance(group, ProcessGroup) or group.rank() < 0:
        return None
    ranks = dist.get_process_group_ranks(group)
    axes = axes_of_ranks(mesh, ranks)
    if axes is not None and set(axes) <= set(SUMMED_AXES):
        return None
    names = mesh.mesh_dim_names or ()
    may = ", ".join(axis for axis in SUMMED_AXES if axis in names) or "no axis"
    over = ", ".join(axes) if axes else f"{len(ranks)} ranks that fill no axis"
    return (
        f"process_group over {over} of a mesh of {', '.join(names)}: only ranks of "
        f"{may} hold the same parameters; leave process_group out"
    )


def alone() -> ProcessGroup:
    """A group of this rank, of a mesh on which no other rank holds the same."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
