# torchrun --nproc-per-node 2 snippets/lc2/unused_parameters.py
import os
from textwrap import fill

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


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, road):
        return getattr(self, road)(x)


road = ("left", "left")[rank]  # no rank uses "right"
model = DistributedDataParallel(TwoRoads())
try:
    model(torch.ones(1, 1), road).sum().backward()
except RuntimeError as error:
    print(fill(f"rank {rank}: {error}", 80, subsequent_indent="    "))

road = ("left", "right")[rank]  # each rank takes another road
model = DistributedDataParallel(TwoRoads(), find_unused_parameters=True)
model(torch.ones(1, 1), road).sum().backward()
left, right = (m.weight.grad.item() for m in (model.module.left, model.module.right))
print(f"rank {rank} went {road}: gradient of left {left}, of right {right}")

dist.barrier()
dist.destroy_process_group()
