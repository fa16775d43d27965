"""Which messages of a pipeline wait for one another with NCCL: those of a communicator.

NCCL runs what one communicator gets in order. torch makes a communicator for each pair
of ranks, at their first message. With `init_process_group(device_id=...)` it takes the
group's own for all pairs: then a receive from one rank also holds up the sends to all
others, and ranks can wait in a circle.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.comm.mesh import group_of_members, timeout_of
from xtrain.comm.p2p import follows_nccl


def second_group(
    group: ProcessGroup | None, device: torch.device
) -> ProcessGroup | None:
    """The same ranks, for the messages to lower ranks; None where one group does."""
    group = group_or_world(group)
    if not follows_nccl(group, device):
        return None
    ranks = dist.get_process_group_ranks(group)
    return group_of_members(ranks, [group], timeout_of(group))


def check_communicators(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Why ranks of this group could wait in a circle; None if they could not."""
    group = group_or_world(group)
    bound = getattr(group, "bound_device_id", None)
    if bound is None or group.size() == 1 or not follows_nccl(group, device):
        return None
    return (
        f"the group is bound to {bound} by device_id, so {group.name()} runs the "
        "messages to all ranks one after the other, and those of a pipeline can wait "
        "in a circle: call init_process_group without device_id"
    )
