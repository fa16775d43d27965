"""The sampler deals the indices that torch's sampler deals."""

from typing import Any

import torch
from torch.utils.data import DistributedSampler as TorchSampler

from xtrain.copying.self_checks.harness import Sent, same, sends


def check(form: Any, rank: int, size: int) -> None:
    with Sent() as sent:
        for length in (1, 10, 101):
            for drop_last in (False, True):
                data: Any = range(length)
                ours = form(data, drop_last=drop_last)
                theirs: Any = TorchSampler(data, drop_last=drop_last)
                for epoch in (0, 1):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    mine, other = torch.tensor(list(ours)), torch.tensor(list(theirs))
                    assert torch.equal(mine, other), (length, drop_last, epoch)
    same("the indices of 1, 10 and 101 samples are torch's", mine, other, 0)
    sends(sent, "nothing", 0)
