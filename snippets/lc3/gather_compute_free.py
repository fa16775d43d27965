# torchrun --nproc-per-node 2 snippets/lc3/gather_compute_free.py
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.collective_choice import TORCH
from xtrain.zero import FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
seen = []


def noted(what, call):
    def collective(*tensors, group=None):
        seen.append(what)
        return call(*tensors, group=group)

    return collective


def alive() -> int:
    shards = [s for u in model.units for s in u.flat_groups]
    return sum(s.full.untyped_storage().nbytes() > 0 for s in shards)


class Layer(nn.Linear):
    def forward(self, x):
        seen.append(f"    layer {self.number} computes, {alive()} of 3 whole")
        x.register_hook(
            lambda _: seen.append(f"    through layer {self.number}, {alive()} whole")
        )
        return super().forward(x)


net = nn.Sequential(*[Layer(100, 100, bias=False) for _ in range(3)])
for number, layer in enumerate(net):
    layer.number = number
spy = replace(
    TORCH,
    name="spy",
    all_gather=noted("all-gather", TORCH.all_gather),
    reduce_scatter=noted("reduce-scatter", TORCH.reduce_scatter),
)
model = FullyShardedDataParallel(net, blocks=[Layer], collectives=spy)
for _step in range(2):  # the first forward learns the order of the layers
    seen.clear()
    out = model(torch.ones(1, 100, requires_grad=True))
    seen.append(f"forward is over, {alive()} whole")
    out.sum().backward()
    seen.append(f"backward is over, {alive()} whole")
if rank == 0:
    print(*seen, sep="\n")

dist.barrier()
dist.destroy_process_group()
