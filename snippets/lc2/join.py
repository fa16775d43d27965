# torchrun --nproc-per-node 2 snippets/lc2/join.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
batches = [torch.full((1, 1), 1.0 + step) for step in range((2, 4)[rank])]

layer = nn.Linear(1, 1, bias=False)
nn.init.zeros_(layer.weight)
model = DistributedDataParallel(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with model.join():
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        model(batch).sum().backward()  # the gradient is the batch
        optimizer.step()
        print(f"rank {rank}, step {step}: gradient {layer.weight.grad.item():g}")
print(f"rank {rank} ends with weight {layer.weight.item():g}")

dist.barrier()
dist.destroy_process_group()
