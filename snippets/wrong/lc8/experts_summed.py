# torchrun --nproc-per-node 4 snippets/wrong/lc8/experts_summed.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def like_dense(grad, mesh):
    """Sum the gradient of this rank's expert over the ranks with other tokens."""
    for axis in ("expert_data", "expert"):  # the bug: these hold other experts
        dist.all_reduce(grad, group=mesh[axis].get_group())
    return grad


def over_copies(grad, mesh):
    dist.all_reduce(grad, group=mesh["expert_data"].get_group())
    return grad


def gradient(tokens, weights, mesh, rule):
    """Tokens [ED, E, T, H] as dispatch has sorted them: T for each expert of a copy."""
    copy, expert = (mesh[a].get_local_rank() for a in ("expert_data", "expert"))
    x, weight = tokens[copy, expert], weights[expert]
    return rule(2 * x.T @ x @ weight, mesh)  # of the sum of squares


def whole(tokens, weights):
    """All experts' gradients, [E, H, H]."""
    return 2 * torch.einsum("deth,detk,eko->eho", tokens, tokens, weights)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    mesh, rank = init_mesh((2, 2), ("expert_data", "expert")), dist.get_rank()
    torch.manual_seed(0)
    tokens, weights = torch.randn(2, 2, 5, 3), torch.randn(2, 3, 3)
    expert = mesh["expert"].get_local_rank()
    right = whole(tokens, weights)[expert]
    for rule in (like_dense, over_copies):
        found = gradient(tokens, weights, mesh, rule)
        print(f"rank {rank}, expert {expert}, {rule.__name__:11}: error "
              f"{(found - right).norm() / right.norm():.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
