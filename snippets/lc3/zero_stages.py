# torchrun --nproc-per-node 4 snippets/lc3/zero_stages.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.zero import AdamW, ZeroOptimizer

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
batches = torch.randn(5, size, 6, 8).double()  # 5 steps, a batch for each rank


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


alone = build(0)  # one process with the data of all ranks
reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
for step in batches:
    reference.zero_grad()
    alone(step.flatten(0, 1)).square().mean().backward()
    reference.step()

for stage in (1, 2):
    model = build(rank)
    optimizer = ZeroOptimizer(model.parameters(), AdamW, stage=stage, lr=0.01)
    for step in batches:
        optimizer.zero_grad()
        model(step[rank]).square().mean().backward()
        grads = sum(p.grad is not None for p in model.parameters())
        optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    equal = all((a - b).abs().max() < 1e-12 for a, b in pairs)
    moments = sum(s["exp_avg"].numel() for s in optimizer.optimizer.state.values())
    total = sum(p.numel() for p in model.parameters())
    print(f"rank {rank}, stage {stage}: {grads} whole gradients left, "
          f"{moments} of {total} moments; as one process: {equal}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
