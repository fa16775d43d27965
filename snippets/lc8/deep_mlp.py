# torchrun --nproc-per-node 2 snippets/lc8/deep_mlp.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
x, y = torch.randn(2, 16, 8, dtype=torch.float64)


def mlp():
    """Four blocks, with the same weights on every rank."""
    torch.manual_seed(1)
    pairs = [(nn.Linear(8, 32).double(), nn.Linear(32, 8).double()) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(up, nn.ReLU(), down) for up, down in pairs))


def train(name, model, step):
    losses = []
    for _ in range(3):
        losses.append(step(model).item())
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    if rank == 0:
        print(f"{name:12}", *(f"{loss:.12f}" for loss in losses))


def whole(model, first=0, every=1):
    loss = (model(x[first::every]) - y[first::every]).square().mean()
    loss.backward()
    return loss.detach()


def half_of_the_rows(model):
    loss = whole(model, rank, 2)
    for tensor in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor.div_(2))
    return loss


def half_of_each_matrix(up, relu, down):
    column, row = ColumnParallelLinear.from_full(up), RowParallelLinear.from_full(down)
    return nn.Sequential(column, relu, row)


def half_of_the_blocks(model):
    cut = torch.empty_like(x)
    if rank == 0:
        out, loss = model(x), torch.zeros_like(x[0, 0])
        dist.send(out.detach(), dst=1)
        dist.recv(cut, src=1)  # the gradient of out
        out.backward(cut)
    else:
        dist.recv(cut, src=0)
        loss = whole(lambda _: model(cut.requires_grad_()))
        dist.send(cut.grad, dst=0)
    dist.all_reduce(loss)
    return loss


train("one process", mlp(), whole)
train("data", mlp(), half_of_the_rows)
train("tensor", nn.Sequential(*(half_of_each_matrix(*b) for b in mlp())), whole)
train("pipeline", mlp()[2 * rank : 2 * rank + 2], half_of_the_blocks)
dist.destroy_process_group()
