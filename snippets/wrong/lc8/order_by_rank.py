# torchrun --nproc-per-node 4 snippets/wrong/lc8/order_by_rank.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def seed_of_rank(seed):
    return seed + dist.get_rank()  # the bug: right for dropout, not for the order


def one_seed(seed):
    return seed


def epoch(samples, mesh, seed_of):
    """The samples that this rank trains on, in their order."""
    generator = torch.Generator().manual_seed(seed_of(0))
    order = torch.randperm(samples, generator=generator, device="cpu")
    data = mesh["data"]
    return order[data.get_local_rank() :: data.size()].tolist()


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    mesh, rank = init_mesh((2, 2), ("data", "tensor")), dist.get_rank()
    for seed_of in (seed_of_rank, one_seed):
        own = epoch(8, mesh, seed_of)
        print(f"rank {rank}, data rank {mesh['data'].get_local_rank()}, "
              f"{seed_of.__name__:12}: samples {own}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
