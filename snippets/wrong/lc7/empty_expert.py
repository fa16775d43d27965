# torchrun --nproc-per-node 2 snippets/wrong/lc7/empty_expert.py
import os

import torch
import torch.distributed as dist


def sum_if_there(weight):
    """Over the replicas of an expert."""
    if weight.grad is not None:  # the bug: a replica without tokens makes no call
        dist.all_reduce(weight.grad)


def sum_always(weight):
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    dist.all_reduce(weight.grad)


def train(x, experts, weights, sum_gradient):
    """A rank's tokens [T, H], each through its expert."""
    for e, weight in enumerate(weights):
        weight.grad = None
        rows = x[experts == e]
        if len(rows):  # an expert without tokens computes nothing
            (rows @ weight).square().sum().backward()
    for weight in weights:
        sum_gradient(weight)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    x, half = torch.randn(8, 3), 8 // size
    experts = torch.arange(8) // half  # all tokens of rank r choose expert r
    whole = torch.autograd.grad(
        sum((x[experts == e] @ w).square().sum() for e, w in enumerate(weights)),
        weights,
    )
    own = slice(rank * half, (rank + 1) * half)
    for sum_gradient in (sum_if_there, sum_always):
        train(x[own], experts[own], weights, sum_gradient)
        said = ["None" if w.grad is None else f"{(w.grad - g).norm() / g.norm():.2f}"
                for w, g in zip(weights, whole)]  # fmt: skip
        print(f"rank {rank}, {sum_gradient.__name__:12}: "
              f"error of experts 0 and 1: {said}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
