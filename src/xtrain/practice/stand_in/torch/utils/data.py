"""Samplers."""

from collections.abc import Iterator, Sized
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.random import Generator, randperm

T = TypeVar("T")


class Sampler(Generic[T]):
    """A class to inherit from."""

    def __init__(self, data_source: Any = None):
        pass


class Dataset(Generic[T]):
    """A class to inherit from."""


class DistributedSampler(Sampler[int]):
    """torch's indices, to compare with."""

    def __init__(self, dataset: Sized, drop_last: bool = False):
        self.count, self.drop_last, self.epoch = len(dataset), drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        order = randperm(self.count, Generator().manual_seed(self.epoch)).tolist()
        each = self.count // ranks if self.drop_last else -(-self.count // ranks)
        places = range(rank, each * ranks, ranks)
        return iter([order[place % self.count] for place in places])
