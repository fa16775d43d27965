# torchrun --nproc-per-node 2 snippets/wrong/lc2/hook_gets_the_parameter.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import check_replicas


def average(grad):
    dist.all_reduce(grad)
    grad.div_(dist.get_world_size())


def data_parallel(model):
    """Meant: each gradient is averaged as soon as it is complete."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)  # the bug: see below
        # This kind of hook is handed the parameter. The gradient is in its `.grad`.


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(4):
        batch = torch.randn(8, 3)
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        norm, slope = model.weight.norm(), model.weight.grad.norm()
        print(f"rank {rank}, step {step}: loss {loss:.3f}, "
              f"norm of weights {norm:.3f}, of gradients {slope:.3f}")  # fmt: skip

    try:
        check_replicas(model)
    except RuntimeError as error:
        print(fill(f"rank {rank}: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
