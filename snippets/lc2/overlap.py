# torchrun --nproc-per-node 2 snippets/lc2/overlap.py
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.collective_choice import TORCH
from xtrain.data_parallel import DistributedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
seen = []


def all_reduce(flat, group=None):
    seen.append(f"send {flat.numel()} elements")
    return TORCH.all_reduce(flat, group=group)


spy = replace(TORCH, name="spy", all_reduce=all_reduce)
net = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(4)])
for number, layer in enumerate(net):
    layer.weight.register_post_accumulate_grad_hook(
        lambda _, number=number: seen.append(f"gradient of layer {number}")
    )
model = DistributedDataParallel(net, bucket_cap_mb=0.08, collectives=spy)  # 2 layers
model(torch.ones(1, 100)).sum().backward()
seen.append("backward returns")
if rank == 0:
    print(*seen, sep="\n")

dist.barrier()
dist.destroy_process_group()
