"""Give every rank its own samples: one shared shuffle, dealt out in turn.

    indices of the epoch    7 2 9 0 4 1 8 3 5 6   + 7 2 to make 12 (or - 5 6 to make 8)
    rank 0 of 4             7       4       5
    rank 1 of 4               2       1       6
    ...

Every rank draws the same permutation, from a seed and the epoch alone, and takes every
N-th index. All ranks get equally many: every step has a collective, in which a rank
with one batch more would wait for the others without end.
"""

import warnings
from collections.abc import Iterator, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """torch's DistributedSampler, index for index.

    Args:
        dataset: anything with a length.
        num_replicas, rank: how many share the data and which one this is; from the
            default process group unless given.
        shuffle: a new permutation every epoch; call `set_epoch` before each, or every
            epoch has the same order, with a warning.
        seed: the same on all ranks.
        drop_last: leave out the tail that does not divide by the ranks; otherwise the
            first samples come again to fill it (count them once when you evaluate).
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < replicas:
            raise ValueError(f"rank {rank} is not in 0..{replicas - 1}")
        self.dataset, self.num_replicas, self.rank = dataset, replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._passes = 0  # since the last set_epoch
        length = len(dataset)
        rounded_down = length // replicas
        rounded_up = -(-length // replicas)
        self.num_samples = rounded_down if drop_last else rounded_up
        self.total_size = self.num_samples * replicas

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        if self._passes == 2 and self.shuffle:
            warnings.warn(
                f"a second pass over epoch {self.epoch} gives the same order again: "
                "call set_epoch before every epoch",
                stacklevel=2,
            )
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(len(indices), generator=generator, device="cpu")
            indices = shuffled.tolist()
        if not self.drop_last and indices:
            while len(indices) < self.total_size:  # fewer samples than that: again
                indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation: call it on every rank before every epoch."""
        self.epoch = epoch
        self._passes = 0
