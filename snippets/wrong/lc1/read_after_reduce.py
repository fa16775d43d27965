# torchrun --nproc-per-node 4 snippets/wrong/lc1/read_after_reduce.py
import os

import torch
import torch.distributed as dist


def mean_loss(loss):
    """The mean over all ranks, for the log and for early stopping."""
    dist.reduce(loss, dst=0)
    return loss / dist.get_world_size()  # the bug: true on rank 0 alone


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    mean = mean_loss(torch.tensor([1.0 + rank]))
    print(f"rank {rank}: mean loss {mean.item()}, stop below 2: {mean.item() < 2}")
    dist.barrier()
    dist.destroy_process_group()
