# torchrun --nproc-per-node 2 snippets/wrong/lc3/zero_over_ddp.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel
from xtrain.zero import ZeroOptimizer


def build(wrapper):
    torch.manual_seed(0)
    model = wrapper(nn.Linear(64, 64, bias=False))
    # The bug: two that reduce the gradients.
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    return model, optimizer


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for wrapper in (nn.Sequential, nn.parallel.DistributedDataParallel):
        model, optimizer = build(wrapper)
        model(torch.full((1, 64), 1.0 + rank)).sum().backward()
        kept = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        print(f"rank {rank}, {wrapper.__name__}: {kept} bytes of whole gradients")
        try:
            optimizer.step()
        except RuntimeError as error:
            print(fill(f"  {error}", 84, subsequent_indent="  "))
    try:
        build(DistributedDataParallel)
    except ValueError as error:
        print(fill(f"rank {rank}, our own: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
