# torchrun --nproc-per-node 2 snippets/wrong/lc4/contiguous_copy.py
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
        grad = grad.clone()  # so that no other gradient is overwritten
        dist.all_reduce(grad.contiguous())  # the bug: into a copy, if it was not
        return grad


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for name, transposed in (("contiguous", False), ("transposed", True)):
        z = torch.ones(2, 3, requires_grad=True)
        y = CopyToRegion.apply(z)
        y = y.t() if transposed else y
        y.backward(torch.ones_like(y, memory_format=torch.contiguous_format))
        print(f"rank {rank}, {name} gradient: dz {z.grad.tolist()}")

    dist.barrier()
    dist.destroy_process_group()
