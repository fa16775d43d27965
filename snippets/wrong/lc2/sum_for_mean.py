# torchrun --nproc-per-node 4 snippets/wrong/lc2/sum_for_mean.py
import os

import torch
import torch.distributed as dist
from torch import nn


def reduce_gradients(model):
    """Meant: the mean over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the bug: a sum that is not divided


def train(optimizer_class, batches, reduce, lr=0.3):
    """The weight after 10 steps, and the gradient of the first."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    optimizer = optimizer_class(layer.parameters(), lr=lr)
    for step in range(10):
        optimizer.zero_grad()
        (layer(batches) - 3 * batches).square().mean().backward()
        reduce(layer)
        if step == 0:
            first = layer.weight.grad.item()
        optimizer.step()
    return layer.weight.item(), first


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = torch.randn(4, 8, 1).double()
    for optimizer_class in (torch.optim.Adam, torch.optim.SGD):
        name, whole = optimizer_class.__name__, data.flatten(0, 1)
        alone, right = train(optimizer_class, whole, lambda _: None)
        together, wrong = train(optimizer_class, data[rank], reduce_gradients)
        if rank == 0:
            print(f"{name}, gradient: {wrong:.3f}, one process {right:.3f}")
            print(f"{name}, weight: {together:.3f}, one process {alone:.3f}")

    dist.barrier()
    dist.destroy_process_group()
