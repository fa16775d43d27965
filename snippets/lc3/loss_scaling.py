# torchrun --nproc-per-node 2 snippets/lc3/loss_scaling.py
import math
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.zero import LossScaler, MixedPrecisionOptimizer

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

# A gradient of 2**-26 is zero in float16: the smallest number there is 2**-24.
weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
(weight * 2.0**-13 * 2.0**-13).sum().backward()
print(f"rank {rank}: gradient without a scale: {weight.grad.item()}")

weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
scaler = LossScaler(init_scale=2.0**12, growth_interval=3)
optimizer = MixedPrecisionOptimizer([weight], torch.optim.SGD, scaler=scaler, lr=1.0)
for step in range(6):
    optimizer.zero_grad()
    optimizer.backward((weight * 2.0**-13 * 2.0**-13).sum())
    if step == 1 and rank == 1:
        weight.grad.fill_(float("inf"))  # an overflow, on one rank only
    stepped = optimizer.step()
    done = "stepped" if stepped else "skipped"
    power = math.log2(scaler.scale)
    print(f"rank {rank}, step {step}: {done}, scale now 2**{power:g}")
((_, master),) = optimizer.pairs
print(f"rank {rank}: the master moved by {-master.item() * 2**26:g} * 2**-26")

dist.barrier()
dist.destroy_process_group()
