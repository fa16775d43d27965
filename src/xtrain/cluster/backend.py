"""The backend "xtrain-virtual", as torch makes its groups."""

from typing import Any

import torch.distributed as dist

from xtrain.cluster import running
from xtrain.cluster.group import NAME, VirtualGroup


def ranks_of_group(cluster: Any, options: Any) -> list[int]:
    """A group's ranks in the cluster: some of them may begin anew, as a smaller job."""
    default: Any = dist.distributed_c10d._world.default_pg
    if options.global_ranks_in_group and default is not None:
        return [default.ranks[rank] for rank in options.global_ranks_in_group]
    if options.group_size == cluster.size:
        return list(range(cluster.size))
    me, store = cluster.scheduler.current.number, options.store
    store.set(f"rank {options.group_rank}", str(me))
    return [int(store.get(f"rank {rank}")) for rank in range(options.group_size)]


def _create(options: Any, backend_options: Any) -> VirtualGroup:
    cluster = running.cluster()
    if cluster is None:
        raise RuntimeError(
            f'backend "{NAME}" is for ranks of a virtual cluster: '
            "VirtualCluster(size).run(fn)"
        )
    ranks = ranks_of_group(cluster, options)
    group = cluster.make_group(options.group_rank, ranks, options.group_id)
    group.set_timeout(options.timeout)
    return group


def register() -> None:
    """Make "xtrain-virtual" known to torch; doing it again does no harm."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "meta"]
        )
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorders is not None:
        recorders.add(NAME)


register()
