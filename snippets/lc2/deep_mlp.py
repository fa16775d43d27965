# torchrun --nproc-per-node 4 snippets/lc2/deep_mlp.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from xtrain.data_parallel import DistributedDataParallel, DistributedSampler

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(7)
data = torch.randn(32, 4)
answers = torch.tanh(data @ torch.randn(4, 1))

torch.manual_seed(rank)  # every rank begins elsewhere; DDP copies rank 0's weights
layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
sampler = DistributedSampler(data, shuffle=True)

for epoch in range(3):
    sampler.set_epoch(epoch)
    mine = list(sampler)
    loss = F.mse_loss(model(data[mine]), answers[mine])
    optimizer.zero_grad()
    loss.backward()
    norms = [layer[0].weight.grad.norm().item() for layer in layers]
    optimizer.step()
    mine = [f"{number:.4f}" for number in (loss.item(), *norms)]
    everyone = [[]] * size
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        print(f"epoch {epoch}   loss    gradient norms of layers 0 to 5")
        for number, (own_loss, *own_norms) in enumerate(everyone):
            print(f"  rank {number}  {own_loss} ", *own_norms)

dist.barrier()
dist.destroy_process_group()
