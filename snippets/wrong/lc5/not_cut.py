# torchrun --nproc-per-node 4 snippets/wrong/lc5/not_cut.py
import os

import torch
import torch.distributed as dist
from torch import nn


class Stage(nn.Module):
    """Blocks rank * n / p and on of n."""

    def __init__(self, blocks, rank, size):
        super().__init__()
        per_rank = blocks // size
        self.mine = range(rank * per_rank, (rank + 1) * per_rank)
        self.blocks = nn.ModuleList(  # the bug: all blocks are built on every rank
            nn.Linear(64, 64) for _ in range(blocks)
        )

    def forward(self, x):
        for number in self.mine:
            x = self.blocks[number](x).relu()
        return x


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stage = Stage(8, rank, size)
    y = stage(torch.ones(1, 64))
    built = sum(p.numel() for p in stage.parameters())
    used = len(stage.mine) * sum(p.numel() for p in stage.blocks[0].parameters())
    print(f"rank {rank}: {built} parameters, uses {used}")

    dist.barrier()
    dist.destroy_process_group()
