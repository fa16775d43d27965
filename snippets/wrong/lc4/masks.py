# torchrun --nproc-per-node 2 snippets/wrong/lc4/masks.py
import os

import torch
import torch.distributed as dist


def dropout(x, generator):
    keep = torch.rand(x.shape, generator=generator) < 0.5
    return x * keep * 2


def seeded(seed):
    """A generator for tensors where they are made: on the GPU, or on the CPU."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def alike(seed):
    """Generators for replicated tensors and for split ones."""
    one = seeded(seed)
    return one, one  # the bug: each rank's slice gets the same mask


def by_rank(seed):
    one = seeded(seed + dist.get_rank())
    return one, one  # the bug: copies of one tensor get different masks


def two_states(seed):
    """Right: the same seed for what is replicated, one per rank for what is split."""
    replicated = seeded(seed)
    return replicated, seeded(seed + 1 + dist.get_rank())


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for generators in (alike, by_rank, two_states):
        replicated, split = generators(seed=7)
        whole = dropout(torch.ones(6), replicated).int().tolist()
        part = dropout(torch.ones(6), split).int().tolist()
        print(f"rank {rank}, {generators.__name__:10}: whole {whole}, split {part}")

    dist.barrier()
    dist.destroy_process_group()
