"""The backend "xtrain-virtual", as torch makes its groups."""

from typing import Any

import torch.distributed as dist

from xtrain.cluster import running
from xtrain.cluster.group import NAME, VirtualGroup


def _create(options: Any, backend_options: Any) -> VirtualGroup:
    cluster = running.cluster()
    if cluster is None:
        raise RuntimeError(
            f'backend "{NAME}" is for ranks of a virtual cluster: '
            "VirtualCluster(size).run(fn)"
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
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
