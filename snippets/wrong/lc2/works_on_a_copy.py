# torchrun --nproc-per-node 2 snippets/wrong/lc2/works_on_a_copy.py
import os

import torch
import torch.distributed as dist
from torch import nn


def share_weights(model):
    """Meant: every rank starts with rank 0's weights."""
    for parameter in model.parameters():
        dist.broadcast(parameter.clone().detach(), src=0)  # the bug: into a clone


def average_gradients(model):
    """Meant: the mean gradient, summed in float32."""
    for parameter in model.parameters():
        total = parameter.grad.float()  # the bug: a copy, unless it was float32
        dist.all_reduce(total)
        parameter.grad.div_(dist.get_world_size())


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    before = model.weight.norm().item()
    share_weights(model)
    after = model.weight.norm().item()
    print(f"rank {rank}: norm of the weights {before:.4f}, shared: {after:.4f}")

    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(1, 1, bias=False, dtype=dtype)
        sample = torch.tensor([1.0 + 2 * rank], dtype=dtype)  # 1 and 3
        layer(sample).sum().backward()  # the gradient is the sample: mean 2
        average_gradients(layer)
        print(f"rank {rank}, {dtype}: mean gradient {layer.weight.grad.item()}")

    dist.barrier()
    dist.destroy_process_group()
