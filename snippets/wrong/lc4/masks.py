# torchrun --nproc-per-node 2 snippets/wrong/lc4/masks.py
import torch
import torch.distributed as dist


def dropout(x, generator):
    keep = torch.rand(x.shape, generator=generator) < 0.5
    return x * keep * 2


def alike(seed):
    """Generators for replicated tensors and for split ones."""
    one = torch.Generator().manual_seed(seed)
    return one, one  # the bug: each rank's slice gets the same mask


def by_rank(seed):
    one = torch.Generator().manual_seed(seed + dist.get_rank())
    return one, one  # the bug: copies of one tensor get different masks


def two_states(seed):
    """Right: the same seed for what is replicated, one per rank for what is split."""
    replicated = torch.Generator().manual_seed(seed)
    return replicated, torch.Generator().manual_seed(seed + 1 + dist.get_rank())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for generators in (alike, by_rank, two_states):
        replicated, split = generators(seed=7)
        whole = dropout(torch.ones(6), replicated).int().tolist()
        part = dropout(torch.ones(6), split).int().tolist()
        print(f"rank {rank}, {generators.__name__:10}: whole {whole}, split {part}")

    dist.barrier()
    dist.destroy_process_group()
