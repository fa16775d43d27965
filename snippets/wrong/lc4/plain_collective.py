# torchrun --nproc-per-node 2 snippets/wrong/lc4/plain_collective.py
import os

import torch
import torch.distributed as dist
from torch import nn


def gather(y):
    """All ranks' columns of y [..., O / N], side by side."""
    pieces = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, y)  # the bug: autograd sees none of it
    return torch.cat(pieces, -1)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    first = nn.Linear(4, 6).weight.detach().chunk(2)[rank].requires_grad_()
    second = nn.Linear(6, 1)
    x = torch.ones(2, 4, requires_grad=True)
    y = gather(x @ first.t())
    second(y).sum().backward()
    gradients = {"x": x.grad, "first": first.grad, "second": second.weight.grad}
    for name, gradient in gradients.items():
        found = None if gradient is None else f"of {gradient.numel()} elements"
        print(f"rank {rank}: gradient of {name:6} {found}")

    dist.barrier()
    dist.destroy_process_group()
