"""DistributedSampler: every rank gets its own samples of one shuffled data set.

    permutation of the epoch   7 2 9 0 4 1 8 3 5 6, then 7 2 again to make 12
    rank 0 of 4                7       4       5
    rank 1 of 4                  2       1       6

Computes:   the indices of this rank: every N-th one of the epoch's permutation.
Sends:      nothing; all ranks draw the same permutation from the seed and the epoch.
Leaves out: checks, and a warning when set_epoch is forgotten.
"""

from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """Call `set_epoch` before every epoch, or each has the same order."""

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        self.dataset, self.shuffle, self.seed, self.epoch = dataset, shuffle, seed, 0
        self.size = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        # All ranks get equally many: they meet in a collective at every step.
        length = len(dataset)
        self.each = length // self.size if drop_last else -(-length // self.size)

    def __iter__(self) -> Iterator[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(indices), generator=generator, device="cpu")
            indices = order.tolist()
        total = self.each * self.size
        while 0 < len(indices) < total:  # the first samples again
            indices += indices[: total - len(indices)]
        return iter(indices[self.rank : total : self.size])

    def __len__(self) -> int:
        return self.each

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation, on every rank."""
        self.epoch = epoch
