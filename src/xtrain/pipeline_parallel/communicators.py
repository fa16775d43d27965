"""Groups for the messages of a pipeline, where NCCL runs those of a group in order.

    lane 0   0 ---> 1    2 ---> 3        each rank is in one pair of a lane at most,
    lane 1        1 ---> 2               and messages of a pair go one way there
    lane 2   0 <--- 1    2 <--- 3
    lane 3        1 <--- 2

With `init_process_group(device_id=...)` torch takes the group's one communicator for
all pairs of ranks, and without it one for each pair: then a receive can hold up a send
that the other rank waits for, and ranks wait in a circle. So each lane is a group of
its own. Its queue on a rank has the messages of one pair in one direction, in the order
in which both ends issue them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world
from xtrain.comm.mesh import group_of_members, timeout_of
from xtrain.comm.p2p import follows_nccl
from xtrain.schedules import Schedule

Pair = tuple[int, int]
"""Who sends, who receives."""


def pairs_of(schedule: Schedule) -> list[Pair]:
    """The ranks that send one another anything; to higher ones first."""
    found = set()
    for stage in range(schedule.stages - 1):
        for i in range(schedule.micro_batches):
            pair = schedule.rank_of(stage, i), schedule.rank_of(stage + 1, i)
            found |= {pair, pair[::-1]}
    return sorted((p for p in found if p[0] != p[1]), key=lambda p: (p[0] > p[1], p))


def lanes_of(pairs: Iterable[Pair]) -> dict[Pair, int]:
    """The first lane of each pair in which neither of its ranks is yet."""
    lanes: dict[Pair, int] = {}
    for pair in pairs:
        taken = {lane for other, lane in lanes.items() if {*other} & {*pair}}
        lanes[pair] = next(n for n in range(len(lanes) + 1) if n not in taken)
    return lanes


def lane_groups(
    schedule: Schedule, group: ProcessGroup | None, device: torch.device
) -> dict[Pair, ProcessGroup]:
    """The group for the messages of each pair; none where one group does for all.

    All ranks of the group call it. With `device_id` torch splits each new group off
    the world's communicator, for which it waits for all ranks of the world.
    """
    group = group_or_world(group)
    if not follows_nccl(group, device):
        return {}
    ranks = dist.get_process_group_ranks(group)
    lanes = lanes_of(pairs_of(schedule))
    made = [
        group_of_members(ranks, [group], timeout_of(group), "pipeline_lane")
        for _ in range(max(lanes.values(), default=-1) + 1)
    ]
    return {pair: made[lane] for pair, lane in lanes.items()}
