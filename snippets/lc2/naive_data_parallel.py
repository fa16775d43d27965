# torchrun --nproc-per-node 4 snippets/lc2/naive_data_parallel.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from xtrain.data_parallel import NaiveDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


torch.manual_seed(42)
inputs, targets = torch.randn(16, 6).double(), torch.randn(16, 2).double()
mine = slice(rank * 4, rank * 4 + 4)  # my quarter of the batch

alone = build(0)  # what one process makes of the whole batch
model = NaiveDataParallel(build(rank))  # other weights on every rank, until now
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
reference = torch.optim.AdamW(alone.parameters(), lr=0.1)
for _step in range(10):
    F.mse_loss(model(inputs[mine]), targets[mine]).backward()
    model.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()

    F.mse_loss(alone(inputs), targets).backward()
    reference.step()
    reference.zero_grad()

pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
apart = max((a - b).abs().max().item() for a, b in pairs)
print(f"rank {rank}: 10 steps later equal to one process: {apart < 1e-12}")

dist.barrier()
dist.destroy_process_group()
