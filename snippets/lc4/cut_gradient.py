# torchrun --nproc-per-node 2 snippets/lc4/cut_gradient.py
import os

import torch
import torch.distributed as dist

from xtrain.comm.autograd import all_gather_split

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, first, second = torch.randn(3, 4), torch.randn(6, 4), torch.randn(1, 6)


def plain(h: torch.Tensor) -> torch.Tensor:
    """torch's collective: autograd does not see it."""
    parts = [torch.empty_like(h) for _ in range(size)]
    dist.all_gather(parts, h.contiguous())
    return torch.cat(parts, -1)


for name, gather in (
    ("dist.all_gather", plain),
    ("all_gather_split", lambda h: all_gather_split(h, -1)),
):
    mine = first.chunk(size, 0)[rank].clone().requires_grad_()
    last = second.clone().requires_grad_()
    loss = (gather(x @ mine.T) @ last.T).square().sum()  # the same number either way
    loss.backward()
    grad = None if mine.grad is None else mine.grad.norm().item()
    print(f"rank {rank}, {name}: loss {loss.item():.3f}, "
          f"gradient of the last weight {last.grad.norm().item():.3f}, "
          f"of the first {'None' if grad is None else f'{grad:.3f}'}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
