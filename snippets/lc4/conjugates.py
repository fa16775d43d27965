# torchrun --nproc-per-node 2 snippets/lc4/conjugates.py
import os

import torch
import torch.distributed as dist

from xtrain.comm.autograd import all_reduce_identity, identity_all_reduce

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(3, 4).double()
up, down = torch.randn(8, 4).double(), torch.randn(4, 8).double()


def mlp(x: torch.Tensor, with_f: bool = True) -> torch.Tensor:
    """Column, tanh, row: this rank's share of the inner features, then the sum."""
    my_up, my_down = up.chunk(size, 0)[rank], down.chunk(size, 1)[rank]
    x = identity_all_reduce(x) if with_f else x
    return all_reduce_identity(torch.tanh(x @ my_up.T) @ my_down.T)


def gradient(function) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


whole = gradient(lambda x: torch.tanh(x @ up.T) @ down.T)
for with_f in (True, False):
    dx = gradient(lambda x, with_f=with_f: mlp(x, with_f))
    right = torch.allclose(dx, whole)
    words = "with f" if with_f else "without"
    print(f"rank {rank}, {words}: dx is that of one process: {right}")
checked = torch.autograd.gradcheck(mlp, x.clone().requires_grad_())
print(f"rank {rank}: gradcheck against finite differences: {checked}")

dist.barrier()
dist.destroy_process_group()
