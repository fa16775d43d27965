# torchrun --nproc-per-node 2 snippets/wrong/lc2/no_first_broadcast.py
import os
from textwrap import fill

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import check_replicas


class DataParallel:
    """Averages gradients of weights that were never made the same."""

    def __init__(self, module):
        self.module = module  # the bug: no broadcast

    def reduce_gradients(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(42)
    inputs = torch.randn(2, 32, 3)[rank].double()  # my half of the data
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(rank)  # as without a seed: another one on every rank
    model = DataParallel(nn.Linear(3, 1, bias=False).double())
    weight = model.module.weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(31):
        optimizer.zero_grad()
        loss = (model.module(inputs) - targets).square().mean()
        loss.backward()
        model.reduce_gradients()
        optimizer.step()
        if step % 10 == 0:
            first = weight.detach().clone()
            dist.broadcast(first, src=0)
            apart = (weight - first).norm().item()
            print(f"rank {rank}, step {step:2}: loss {loss.item():.4f}, "
                  f"distance from rank 0's weights {apart:.4f}")  # fmt: skip

    try:
        check_replicas(model.module)
    except RuntimeError as error:
        print(fill(f"rank {rank}: {error}", 84, subsequent_indent="  "))

    dist.barrier()
    dist.destroy_process_group()
