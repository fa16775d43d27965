# torchrun --nproc-per-node 2 snippets/wrong/lc7/aux_scale.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F


def share(p):
    return F.one_hot(p.argmax(-1), p.shape[1]).to(p).mean(0)


def of_own_tokens(p):
    """p [T, E] of this rank's tokens. Its part of the loss, and of its gradient."""
    # The bug: the mean of losses of parts is not the loss of all tokens.
    return p.shape[1] * (share(p) * p.mean(0)).sum() / dist.get_world_size()


def not_divided(p):
    f = share(p)
    dist.all_reduce(f)
    f = f / dist.get_world_size()
    return p.shape[1] * (f * p.mean(0)).sum()  # the bug: ranks are added up later


def of_all_tokens(p):
    return not_divided(p) / dist.get_world_size()


def step(x, router, rule):
    """Loss and gradient of the router, summed over ranks with other tokens."""
    loss = rule((x @ router.T).softmax(-1))
    (grad,) = torch.autograd.grad(loss, router)
    total = loss.detach().clone()
    for tensor in (total, grad):
        dist.all_reduce(tensor)
    return total, grad


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    # Each half of the tokens has its own expert, and one token has the other one.
    router, x = torch.eye(2).requires_grad_(), torch.eye(2).repeat_interleave(4, 0)
    x[0] = x[7]
    p = (x @ router.T).softmax(-1)
    whole = 2 * (share(p) * p.mean(0)).sum()
    (right,) = torch.autograd.grad(whole, router)
    for rule in (of_own_tokens, not_divided, of_all_tokens):
        loss, grad = step(x.chunk(size)[rank], router, rule)
        wrong = (grad - right).norm() / right.norm()
        print(f"rank {rank}, {rule.__name__:13}: loss {loss:.2f} where one process has "
              f"{whole:.2f}, gradient's error {wrong:.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
