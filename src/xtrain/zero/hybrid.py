"""Hybrid sharding (HSDP): shard over the ranks of a node, replicate over the nodes.

    node 0    rank 0  rank 1     one copy of the model, in n = 2 shards   -- inner
    node 1    rank 2  rank 3     another copy, cut alike
                 |       |
               outer   outer     the same shard, m = 2 times

    forward    unit    all-gather of its weights over inner
    backward   unit    all-gather again, reduce-scatter of its gradients over inner,
                       all-reduce of that shard over outer, under way until the end

With P bytes of parameters a rank sends 3(n-1)/n P over inner, which NVLink carries, and
2(m-1)/m P/n over outer, the network, once a step if micro-batches defer it. Sharded
over all N = nm ranks it sends 3(N-1)/N P for each micro-batch, by a ring that crosses
the network. The price is memory: 16/n bytes a parameter with Adam, not 16/N.

Every rank first has the sum over its node, then the sum of its shard over the nodes; so
all copies take the same step, and stay equal to the bit.

Zhao et al., PyTorch FSDP, 2023, section 3.2.2; Zhang et al., MiCS, 2022.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.agreement import check_same
from xtrain.comm.checks import group_or_world, rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.comm.mesh import (
    REPLICA_AXES,
    group_of_members,
    groups_along,
    mesh_of,
    replica_group,
    timeout_of,
)
from xtrain.comm.work import Work
from xtrain.comm.wrapper_mesh import alone
from xtrain.zero.hybrid_checks import check_grid, problem_with_sizes


class Replicas:
    """The ranks that hold the same shards, and the sums over them that are under way.

    Args:
        group: the outer group.
        collectives: whose all-reduce.
    """

    def __init__(self, group: ProcessGroup, collectives: Collectives):
        self.group, self._collectives = group, collectives
        self.rank, self.size = rank_and_size(group)
        self.deferring = False
        """Shards are kept, and summed over replicas later."""
        self._under_way: list[Work] = []

    @contextmanager
    def defer(self, deferring: bool = True) -> Iterator[None]:
        """Let sums be issued later, or not."""
        before, self.deferring = self.deferring, deferring
        try:
            yield
        finally:
            self.deferring = before

    def begin_sum(self, shard: Tensor, finish: Callable[[], None]) -> None:
        """Issue the all-reduce of a gradient shard, in place; `finish` in `wait`."""
        work = self._collectives.all_reduce(shard, group=self.group)
        self._under_way.append(Work([work], finish))

    def wait(self) -> None:
        """Have all sums, in the order in which they were issued."""
        while self._under_way:
            self._under_way.pop(0).wait()

    def abandon(self) -> None:
        """Forget the sums of a backward that failed."""
        while self._under_way:
            self._under_way.pop(0).abandon()


class Grid(NamedTuple):
    """The groups of a fully sharded model."""

    everyone: ProcessGroup | None
    """All ranks whose gradients are summed; None for all, or what a mesh names."""
    shards: ProcessGroup | None = None
    """The ranks of one copy; the same as `everyone` without replicas."""
    replicas: ProcessGroup | None = None
    """The ranks that hold the same shard of other copies; None for one copy."""

    def make_replicas(self, collectives: Collectives) -> Replicas | None:
        """For the sums over the copies, by the all-reduce of these collectives."""
        return None if self.replicas is None else Replicas(self.replicas, collectives)


def grid_of(
    module: nn.Module, inner: ProcessGroup | None, outer: ProcessGroup | None
) -> Grid:
    """The groups of a wrapper that was given these two; every rank of both calls it.

    ValueError on each of them unless they are rows and columns of a grid.
    """
    if outer is None:
        return Grid(inner, inner)
    rows = check_grid(inner, outer)
    inner = group_or_world(inner)
    ranks = sorted(rank for row in rows for rank in row)
    return Grid(group_of_both(module, inner, outer, ranks), inner, outer)


def group_of_both(
    module: nn.Module, inner: ProcessGroup, outer: ProcessGroup, ranks: list[int]
) -> ProcessGroup:
    """The group of all ranks of the grid: one that there is, or a new one."""
    known = [inner, outer, group_or_world(None)]
    with suppress(ValueError):  # parts of several meshes: refused by the wrapper next
        known.append(replica_group(mesh_of(module)) or inner)
    for group in known:
        if dist.get_process_group_ranks(group) == ranks:
            return group
    return group_of_members(ranks, [inner, outer], timeout_of(inner), "hybrid")


def hybrid_groups(
    inner_size: int,
    group: ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> tuple[ProcessGroup, ProcessGroup]:
    """This rank's inner and outer group, for `FullyShardedDataParallel`.

    Of 8 ranks with `inner_size=4` the inner groups are [0, 1, 2, 3] and [4, 5, 6, 7],
    the outer ones [0, 4], [1, 5], [2, 6] and [3, 7]. With 4 GPUs in a node an inner
    group is a node.

    Args:
        inner_size: ranks that share one copy; it divides the group's size.
        group: whose ranks, all of which call it; None for all.
        mesh: instead of a group: cut each of its "data" groups, or "expert_data"
            groups. All ranks of the mesh call it.

    ValueError on every rank if `inner_size` does not fit, or ranks give others.
    """
    if mesh is not None and group is not None:
        raise ValueError("hybrid_groups takes a group or a mesh, not both")
    data = group_or_world(group) if mesh is None else replica_group(mesh) or alone()
    _, size = rank_and_size(data)
    held = data if mesh is None else mesh
    everyone = held.size() == dist.get_world_size()
    problem = problem_with_sizes(inner_size, size)
    asked = group_or_world(None) if everyone else data
    check_same("groups", [], asked, {"inner_size": inner_size}, problem)
    if everyone:
        return cut_of_world(inner_size, size, mesh)
    timeout = timeout_of(data)
    grid = torch.tensor(dist.get_process_group_ranks(data)).view(-1, inner_size)
    row, column = divmod(data.rank(), inner_size)
    members = grid[row].tolist(), grid[:, column].tolist()
    inner = group_of_members(members[0], [data], timeout, "hybrid_inner")
    return inner, group_of_members(members[1], [data], timeout, "hybrid_outer")


def cut_of_world(
    inner_size: int, size: int, mesh: DeviceMesh | None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Both groups where all ranks of the world take part: every rank makes them all."""
    ranks = torch.arange(size) if mesh is None else mesh.mesh
    names = (mesh and mesh.mesh_dim_names) or ()
    axes = [n for n, axis in enumerate(names) if axis in REPLICA_AXES]
    if mesh is not None and not axes:  # a missing axis has size 1
        ranks = ranks.unsqueeze(0)
    axis = max(axes, key=lambda n: ranks.shape[n], default=0)
    timeout = timeout_of(None)
    grid = ranks.unflatten(axis, (size // inner_size, inner_size))
    inner = groups_along(grid, [axis + 1], timeout, "hybrid_inner")
    return inner, groups_along(grid, [axis], timeout, "hybrid_outer")
