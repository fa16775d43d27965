# torchrun --nproc-per-node 2 snippets/wrong/lc2/tied_reduced_twice.py
import os

import torch
import torch.distributed as dist
from torch import nn


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight  # one parameter, two places

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))


def reduce_gradients(model):
    """Meant: the sum over the ranks of every gradient."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            dist.all_reduce(parameter.grad)  # the bug: a tied one comes by twice


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TiedModel().double()
    model(torch.tensor([1, 2, 3])).square().sum().backward()  # alike on all ranks
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    reduce_gradients(model)
    for name, parameter in model.named_parameters():
        ratio = (parameter.grad.norm() / alone[name].norm()).item()
        print(f"rank {rank}, {name}: {ratio:g} times one rank's, right is {size}")

    dist.barrier()
    dist.destroy_process_group()
