# torchrun --nproc-per-node 2 snippets/wrong/lc5/copies_drift.py
import os

import torch
import torch.distributed as dist


def swap(tensor):
    """With the other of two ranks."""
    other, came = 1 - dist.get_rank(), torch.empty_like(tensor)
    calls = [
        dist.P2POp(dist.isend, tensor.contiguous(), other),
        dist.P2POp(dist.irecv, came, other),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return came


def tied(weight, ids):
    """Rank 0 looks up rows of the weight, rank 1 multiplies by it: a tied embedding."""
    rank = dist.get_rank()
    x = weight[ids] if rank == 0 else torch.empty(len(ids), weight.shape[1]).to(weight)
    came = swap(x.detach())
    if rank == 1:
        (came.requires_grad_() @ weight.t()).square().sum().backward()
    dx = swap(came.grad if rank == 1 else torch.empty_like(x))
    if rank == 0:
        x.backward(dx)
    return weight.grad  # the bug: a part on each rank


def mirrored(first, second, x):
    """Both ranks hold both stages: rank 0's x goes 0 -> 1, rank 1's goes 1 -> 0."""
    y = first(x)
    came = swap(y.detach()).requires_grad_()
    second(came).square().sum().backward()
    y.backward(swap(came.grad))
    return first.weight.grad, second.weight.grad  # the bug: of one direction each


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    table = torch.randn(4, 2, requires_grad=True)
    first, second = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    x = torch.randn(2, 3, 2)
    ids = torch.tensor([0, 2])
    (table[ids] @ table.t()).square().sum().backward()
    second(first(x)).square().sum().backward()
    wholes = [table.grad, first.weight.grad, second.weight.grad]
    table.grad = first.weight.grad = second.weight.grad = None
    found = [tied(table, ids), *mirrored(first, second, x[rank])]
    names = ("tied table", "stage 0", "stage 1")
    for name, grad, whole in zip(names, found, wholes, strict=True):
        print(f"rank {rank}, its copy of {name:10}: gradient {grad.norm():.2f}, "
              f"right is {whole.norm():.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
