import math

import torch
import torch.distributed as dist


class DistributedSampler(torch.utils.data.Sampler):
    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.n = len(dataset)
        self.world = num_replicas if num_replicas is not None else dist.get_world_size()
        self.me = rank if rank is not None else dist.get_rank()
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def __len__(self):
        if self.drop_last:
            return math.floor(self.n / self.world)
        return math.ceil(self.n / self.world)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.n, generator=g).tolist()
        else:
            order = list(range(self.n))
        for i in range(len(self)):
            position = i * self.world + self.me
            if not self.drop_last:
                position %= self.n
            yield order[position]
