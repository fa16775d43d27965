# torchrun --nproc-per-node 2 snippets/wrong/lc2/hook_before_accumulation.py
import os

import torch
import torch.distributed as dist
from torch import nn


class DataParallel:
    """Averages gradients in the backward of the last micro-batch."""

    def __init__(self, module):
        self.module, self.last = module, True
        for parameter in module.parameters():
            parameter.register_hook(self.average)  # the bug: before `.grad` adds up

    def average(self, grad):
        if self.last:  # `grad` is what this backward found, not the sum so far
            dist.all_reduce(grad)
            grad = grad / dist.get_world_size()
        return grad

    def accumulate(self, batches):
        for number, batch in enumerate(batches):
            self.last = number == len(batches) - 1
            self.module(batch).sum().backward()


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for count in (1, 2, 4):
        layer = nn.Linear(1, 1, bias=False)
        batches = torch.full((count, 1), 1.0 + 2 * rank)  # 1s and 3s
        DataParallel(layer).accumulate(batches)
        found = layer.weight.grad.item()
        print(f"rank {rank}, {count} micro-batches: {found:g}, right: {2 * count}")

    dist.barrier()
    dist.destroy_process_group()
