# python snippets/wrong/lc7/detached.py
import torch
import torch.distributed as dist

from xtrain.testing import RankTimeout, World


class AllToAll(torch.autograd.Function):
    """Rows to all ranks and from all ranks; backward takes them the way back."""

    @staticmethod
    def forward(ctx, rows, sent, came):
        ctx.sizes = sent, came
        out = rows.new_empty(sum(came), rows.shape[1])
        dist.all_to_all_single(out, rows, came, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, came = ctx.sizes
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, came)
        return out, None, None


def detached(rows, weight):
    if len(rows) == 0:
        return torch.zeros_like(rows)  # the bug: no graph, so no backward
    return rows @ weight


def attached(rows, weight):
    return rows @ weight  # of 0 rows, too


def program(expert):
    """Each rank has 2 tokens, and all choose the expert of rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x, weight = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    dense = torch.ones(3, requires_grad=True)
    sent = [2] + [0] * (size - 1)
    came = [2 if rank == 0 else 0] * size
    h = x * dense
    rows = AllToAll.apply(h, sent, came)
    y = h + AllToAll.apply(expert(rows, weight), came, sent)
    y.sum().backward()
    return weight.grad is not None


if __name__ == "__main__":
    with World(2) as world:
        print(f"attached: the expert has a gradient: {world.run(program, attached)}")
        try:
            print(world.run(program, detached, timeout=2))
        except RankTimeout as error:
            print(f"detached: {error.headline}")
            for report in error.reports:
                where = report.summary.partition(", in ")[0] or report.kind
                print(f"rank {report.rank}: {where}")
