# torchrun --nproc-per-node 2 snippets/wrong/lc5/hooks_bypassed.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel


def backward_input(loss, x, parameters):
    """B: the gradient of the input; and W, to be called later."""
    parameters = list(parameters)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)

    def backward_weight():
        for p, grad in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            p.grad = grad  # the bug: hooks of p never run

    return dx, backward_weight


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for how in ("one backward", "in two parts"):
        torch.manual_seed(0)
        stage = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        x = torch.full((1, 2), 1.0 + 2 * rank, requires_grad=True)
        loss = stage(x).sum()
        if how == "one backward":
            loss.backward()
        else:
            _, backward_weight = backward_input(loss, x, stage.parameters())
            backward_weight()
        (weight,) = stage.parameters()
        print(f"rank {rank}, {how}: gradient {weight.grad.tolist()[0]}")

    dist.barrier()
    dist.destroy_process_group()
