# torchrun --nproc-per-node 2 snippets/wrong/lc7/clip_norm.py
import os

import torch
import torch.distributed as dist


def of_this_rank(dense, expert):
    return (dense.square().sum() + expert.square().sum()).sqrt()  # the bug: only here


def of_all_ranks(dense, expert):
    total = dense.square().sum() + expert.square().sum()
    dist.all_reduce(total)  # the bug: each rank has the same dense gradient
    return total.sqrt()


def of_each_once(dense, expert):
    total = expert.square().sum()
    dist.all_reduce(total)
    return (dense.square().sum() + total).sqrt()


def clip(dense, expert, most, norm):
    """Both gradients, scaled so that the norm of all of them is at most this."""
    scale = (most / norm(dense, expert)).clamp(max=1.0)
    return dense * scale, expert * scale


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    dense = torch.tensor([2.0, 4.0])  # after its sum over the ranks
    expert = torch.tensor([5.0, 2.0]) if rank == 0 else torch.tensor([4.0, 6.0])
    for norm in (of_this_rank, of_all_ranks, of_each_once):
        clipped, _ = clip(dense, expert, 1.0, norm)
        print(f"rank {rank}, {norm.__name__:12}: norm {norm(dense, expert):.2f}, "
              f"dense gradient {[f'{g:.3f}' for g in clipped.tolist()]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
