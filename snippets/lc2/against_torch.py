# torchrun --nproc-per-node 2 snippets/lc2/against_torch.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from xtrain.data_parallel import DistributedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()


def train(wrapper) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = wrapper(nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _step in range(20):
        inputs = torch.randn(8, 5)
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


ours = train(DistributedDataParallel)
theirs = train(nn.parallel.DistributedDataParallel)
pairs = zip(ours.values(), theirs.values(), strict=True)
print(f"rank {rank}, same bits after 20 steps:", all(a.equal(b) for a, b in pairs))
print(f"rank {rank}, our keys:   ", *ours)
print(f"rank {rank}, torch's keys:", *theirs)

dist.barrier()
dist.destroy_process_group()
