# torchrun --nproc-per-node 2 snippets/wrong/lc4/in_place_sum.py
import os

import torch
import torch.distributed as dist


class CopyToRegion(torch.autograd.Function):
    """f: nothing in forward, the sum over ranks in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)  # the bug: others read this tensor, too
        return grad


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for name, residual in (("f(z)", False), ("f(z) + z", True)):
        z = torch.ones(3, requires_grad=True)
        y = CopyToRegion.apply(z) + z if residual else CopyToRegion.apply(z)
        grad = torch.ones(3)
        y.backward(grad)
        right = dist.get_world_size() + residual
        print(f"rank {rank}, {name:8}: dz {z.grad.tolist()}, right is {right}; "
              f"what came in: {grad.tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
