# torchrun --nproc-per-node 2 snippets/wrong/lc2/skips_the_unused.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(1, 1, bias=False)
        self.right = nn.Linear(1, 1, bias=False)

    def forward(self, x, road):
        return getattr(self, road)(x)


def reduce_gradients(model):
    """Meant: the mean gradient of every parameter."""
    for parameter in model.parameters():
        if parameter.grad is not None:  # the bug: not None *here*; and elsewhere?
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    model = TwoRoads()
    road = ("left", "right")[rank]
    sample = torch.tensor([[10.0, 1000.0][rank]])  # the gradient is the sample
    model(sample, road).sum().backward()
    reduce_gradients(model)
    for name in ("left", "right"):
        grad = getattr(model, name).weight.grad
        right = {"left": 5, "right": 500}[name]
        found = "none" if grad is None else f"{grad.item():g}"
        print(f"rank {rank}: gradient of {name} is {found}, right is {right}")

    try:
        DistributedDataParallel(model)(sample, road).sum().backward()
    except RuntimeError as error:
        print(fill(f"rank {rank}, our DDP: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
