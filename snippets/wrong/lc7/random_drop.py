# torchrun --nproc-per-node 2 snippets/wrong/lc7/random_drop.py
import os

import torch
import torch.distributed as dist


def at_random(tokens, capacity):
    """Which tokens of an expert it computes: so that no position is favoured."""
    return torch.randperm(tokens)[:capacity]  # the bug: of this rank's generator


def first_come(tokens, capacity):
    return torch.arange(capacity)


def expert(x, weight, kept):
    """All tokens [T, H] on each rank, and some columns of the input of the weight."""
    rank, size = dist.get_rank(), dist.get_world_size()
    y = torch.zeros(len(x), weight.shape[0]).to(x)
    y[kept] = x[kept].chunk(size, 1)[rank] @ weight.chunk(size, 1)[rank].T
    dist.all_reduce(y)  # a sum of partial products
    return y


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # as for dropout: not the same on all ranks
    x, weight = torch.ones(6, 4), torch.ones(1, 4)
    for choose in (at_random, first_come):
        kept = choose(6, 3)
        y = expert(x, weight, kept)
        print(f"rank {rank}, {choose.__name__:10}: keeps tokens "
              f"{sorted(kept.tolist())}, y {y.flatten().int().tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
