# torchrun --nproc-per-node 2 snippets/wrong/lc5/loss_scale.py
import os

import torch
import torch.distributed as dist
from torch import nn


def by_ranks(total, count, m):
    return total / count / dist.get_world_size()  # the bug: there are m micro-batches


def mean_of_means(total, count, m):
    return total / count / m  # the bug: right if all micro-batches count alike


def step(scaled, stage, inputs, targets, m):
    """Two stages, one micro-batch after another; targets of 0 do not count."""
    for x, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        if dist.get_rank() == 0:
            y = stage(x)
            dist.send(y.detach(), 1)
            dy = torch.empty_like(y)
            dist.recv(dy, 1)
            y.backward(dy)
        else:
            x = torch.empty_like(x)
            dist.recv(x, 0)
            y = stage(x.requires_grad_())
            total = (y - target).square()[target != 0].sum()
            scaled(total, (target != 0).sum(), m).backward()
            dist.send(x.grad, 0)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    even, uneven = torch.ones(8, 1), torch.tensor([[1.0]] * 5 + [[0.0]] * 3)
    for scaled, other in ((by_ranks, (4, even)), (mean_of_means, (2, uneven))):
        for m, targets in ((2, even), other):
            torch.manual_seed(0)
            stages, x = [nn.Linear(1, 1) for _ in range(2)], torch.randn(8, 1)
            y = stages[1](stages[0](x))
            ((y - targets).square()[targets != 0].mean()).backward()
            right = stages[rank].weight.grad.item()
            stages[rank].zero_grad()
            step(scaled, stages[rank], x, targets, m)
            times = stages[rank].weight.grad.item() / right
            print(f"rank {rank}, {scaled.__name__:13}: {m} micro-batches, "
                  f"{int(targets.sum())} targets: gradient x {times:.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
