# torchrun --nproc-per-node 2 snippets/wrong/lc7/gathered_input.py
import os

import torch
import torch.distributed as dist


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def summed(x):  # as a reduce-scatter: the sum over ranks of this rank's rows
    x = x.clone()
    dist.all_reduce(x)
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def own(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


class Change(torch.autograd.Function):  # one function there, another one back
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def moe(x, experts, weight, back=own):  # the bug: other ranks' experts add to dx
    """Tokens of all ranks come to this rank's expert; its outputs return in a sum."""
    everything = Change.apply(x, gathered, back)
    mine = (gathered(experts) == dist.get_rank())[:, None]
    return Change.apply(mine * (everything @ weight), summed, gathered)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, weights = torch.randn(8, 3), torch.randn(size, 3, 3)
    experts = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])
    x.requires_grad_()
    y = torch.einsum("th,tho->to", x, weights[experts])
    (right,) = torch.autograd.grad(y.square().sum(), x)
    for back in (own, summed):
        mine = x.detach().chunk(size)[rank].requires_grad_()
        out = moe(mine, experts.chunk(size)[rank], weights[rank], back)
        (dx,) = torch.autograd.grad(out.square().sum(), mine)
        good = torch.isclose(dx, right.chunk(size)[rank], atol=1e-5).all(1)
        print(f"rank {rank}, backward {back.__name__:6}: "
              f"y right: {torch.allclose(out, y.chunk(size)[rank], atol=1e-5)}, "
              f"dx right for experts "
              f"{experts.chunk(size)[rank][good].unique().tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
