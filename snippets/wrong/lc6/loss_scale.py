# torchrun --nproc-per-node 2 snippets/wrong/lc6/loss_scale.py
import os

import torch
import torch.distributed as dist


def mean_then_sum(losses, counts):
    return losses[counts].mean()  # the bug: a mean on each rank, and a sum of ranks


def mean_then_average(losses, counts):
    # The bug: a token of a rank that has few which count weighs more.
    return losses[counts].mean() / dist.get_world_size()


def share_of_all(losses, counts):
    everyone = counts.sum()
    dist.all_reduce(everyone)
    return losses[counts].sum() / everyone


def step(weight, x, counts, rule):
    """A rank's tokens x [S, D]; the loss it would show, and the gradient in sum."""
    loss = rule((x @ weight).square(), counts)
    (grad,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total, grad


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weight, x = torch.randn(3, requires_grad=True), torch.randn(8, 3)
    for name, counting in (("8 of 8", 8), ("5 of 8", 5)):
        counts = torch.arange(8) < counting
        whole = (x @ weight).square()[counts].mean()
        (right,) = torch.autograd.grad(whole, weight)
        for rule in (mean_then_sum, mean_then_average, share_of_all):
            part = x.chunk(size)[rank], counts.chunk(size)[rank]
            loss, grad = step(weight, *part, rule)
            factor, wrong = grad.norm() / right.norm(), (grad - right).norm()
            print(f"rank {rank}, {name:6}, {rule.__name__:17}: times the right loss "
                  f"{loss / whole:.2f}, gradient {factor:.2f}, "
                  f"its error {wrong / right.norm():.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
