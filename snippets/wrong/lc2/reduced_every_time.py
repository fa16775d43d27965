# torchrun --nproc-per-node 2 snippets/wrong/lc2/reduced_every_time.py
import os

import torch
import torch.distributed as dist
from torch import nn


def accumulate(model, batches):
    """Meant: the sum over the micro-batches and the ranks."""
    for batch in batches:
        model(batch).sum().backward()  # adds to grad ...
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the bug: what was summed already


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for count in (1, 2, 3, 4):
        layer = nn.Linear(1, 1, bias=False)
        accumulate(layer, torch.ones(count, 1))  # each gradient is 1
        if rank == 0:
            found = layer.weight.grad.item()
            print(f"{count} micro-batches, 2 ranks: {found:g}, right: {2 * count}")

    dist.barrier()
    dist.destroy_process_group()
