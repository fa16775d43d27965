# torchrun --nproc-per-node 2 snippets/wrong/lc3/no_gather_after_step.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import check_replicas


def step(weight, lr):
    """ZeRO-1: my half of the summed gradient, my half of the update."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = list(weight.grad.flatten().chunk(size))
    mine = torch.empty_like(gradients[rank])
    dist.reduce_scatter(mine, gradients)
    weight.data.flatten().chunk(size)[rank].sub_(lr * mine / size)
    weight.grad = None  # the bug: the new half is not all-gathered


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False).double()
    data = torch.randn(2, 16, 4).double()[rank]
    for number in range(16):
        loss = (layer(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        step(layer.weight, lr=0.1)
        if number % 5 == 0:
            values = " ".join(f"{w:6.3f}" for w in layer.weight.flatten().tolist())
            print(f"rank {rank}, step {number:2}: loss {loss:.2f}, weights", values)

    try:
        check_replicas(layer)
    except RuntimeError as error:
        print(fill(f"rank {rank}: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
