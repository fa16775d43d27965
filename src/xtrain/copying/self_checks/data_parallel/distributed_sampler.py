"""The sampler deals the indices that torch's sampler deals."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler as TorchSampler

from xtrain.copying.self_checks.harness import Group, Sent, same, sends
from xtrain.whiteboard.data_parallel.distributed_sampler import DistributedSampler


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with Sent(group) as sent:
        for length in (1, 2, 3, 5, 10, 13, 101):
            for shuffle, drop_last, seed in (
                (True, False, 0), (False, False, 0), (True, True, 7), (False, True, 7),
            ):  # fmt: skip
                given: Any = (range(length), size, rank, shuffle, seed, drop_last)
                ours, theirs = DistributedSampler(*given), TorchSampler(*given)
                for epoch in (0, 1, 5):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    assert list(ours) == list(theirs), (given, epoch)
                    assert len(ours) == len(theirs), given
        dealt, torchs = torch.tensor(list(ours)), torch.tensor(list(theirs))
        same("1 to 101 samples are dealt as by torch", dealt, torchs, 0, group)
        assert list(DistributedSampler(range(0), size, rank)) == []
        if group is None:  # it asks for rank and size itself
            data: Any = range(2 * size)
            mine = torch.tensor(list(DistributedSampler(data, shuffle=False)))
            same(
                "this rank's samples of 2 N", mine, torch.tensor([rank, rank + size]), 0
            )
    sends(sent, "nothing", 0, group)
