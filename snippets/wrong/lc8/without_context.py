# torchrun --nproc-per-node 4 snippets/wrong/lc8/without_context.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def over_data(grad, mesh):
    """Sum the gradients of ranks with other tokens."""
    # The bug: context ranks have other tokens, too, of the same rows.
    dist.all_reduce(grad, group=mesh["data"].get_group())


def over_both(grad, mesh):
    for axis in ("data", "context"):
        dist.all_reduce(grad, group=mesh[axis].get_group())


def step(x, weight):
    """Gradient of the mean square of x [B, S, H] @ weight, if divided by its tokens."""
    return 2 * torch.einsum("bsh,bsk,ko->ho", x, x, weight)


def train(x, weight, mesh, rule, steps=3):
    """On this rank's rows, and its part of each of them."""
    tokens, weight = x.shape[0] * x.shape[1], weight.clone()
    for dim, axis in enumerate(("data", "context")):
        x = x.chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
    for _ in range(steps):
        grad = step(x, weight) / tokens
        rule(grad, mesh)
        weight -= 0.1 * grad
    return weight


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    mesh, rank = init_mesh((2, 2), ("data", "context")), dist.get_rank()
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, 3), torch.randn(3, 3)
    for rule in (over_data, over_both):
        found = train(x, weight, mesh, rule)
        first = found.clone()
        dist.broadcast(first, 0)
        print(f"rank {rank}, {rule.__name__}: norm of the weight {found.norm():.4f}, "
              f"distance from rank 0's {(found - first).norm():.4f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
