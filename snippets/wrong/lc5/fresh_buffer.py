# torchrun --nproc-per-node 3 snippets/wrong/lc5/fresh_buffer.py
import os

import torch
import torch.distributed as dist
from torch import nn


def forward(stage, x):
    """What this rank's stage was given."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.zeros_like(x)
    if rank > 0:
        dist.recv(buffer, rank - 1)
        x = buffer
    y = stage(x)
    if rank < size - 1:
        buffer = torch.zeros_like(y)  # a buffer for what is sent
        dist.send(buffer, rank + 1)  # the bug: it is empty
    return x


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    x = torch.ones(1, 2)
    given = forward(stages[rank], x)
    right = nn.Sequential(*stages[:rank])(x)
    shown = [[f"{v:.2f}" for v in t.flatten().tolist()] for t in (given, right)]
    print(f"rank {rank}: its stage was given {shown[0]}, right is {shown[1]}")

    dist.barrier()
    dist.destroy_process_group()
