"""Norm and MLP on a part of the sequence equal those of one process."""

import torch
import torch.distributed as dist
from torch import nn

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    gradient,
    in_both,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.tensor_parallel.sequence_parallel_region import (
    SequenceParallelRegion,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    norm, exact_norm = in_both(nn.RMSNorm(6, 1e-5), dtype)
    up, exact_up = in_both(nn.Linear(6, 5 * size, bias=False), dtype)
    down, exact_down = in_both(nn.Linear(5 * size, 6, bias=False), dtype)
    exact = nn.Sequential(exact_norm, exact_up, nn.Tanh(), exact_down)
    mine_up, mine_down = (nn.Linear(*n, False, dtype=dtype) for n in ((6, 5), (5, 6)))
    with torch.no_grad():
        mine_up.weight.copy_(up.weight.chunk(size, 0)[rank])
        mine_down.weight.copy_(down.weight.chunk(size, 1)[rank])
    block = nn.Sequential(mine_up, nn.Tanh(), mine_down)
    region = SequenceParallelRegion(norm, block, group)

    x, grad = (randn(3, 2 * size, 6, seed=n, dtype=dtype) for n in (1, 2))
    whole = x.to(torch.float64, copy=True).requires_grad_()
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    for _ in range(2):  # gradients add up
        y = whole + exact(whole)
        y.backward(grad.double())
        with Sent(group) as sent:
            out = region(mine)
            out.backward(grad.chunk(size, 1)[rank])
    near("a part of the sequence", out, y.chunk(size, 1)[rank], dtype, group)
    part = gradient(whole).chunk(size, 1)[rank]
    near("a part of dX", gradient(mine), part, dtype, group)
    full = gradient(exact_norm.weight)
    near("all of the norm's dW", gradient(norm.weight), full, dtype, group)
    part = gradient(exact_up.weight).chunk(size, 0)[rank]
    near("a part of the first dW", gradient(mine_up.weight), part, dtype, group)
    part = gradient(exact_down.weight).chunk(size, 1)[rank]
    near("a part of the second dW", gradient(mine_down.weight), part, dtype, group)
    nbytes = 2 * x.nbytes + norm.weight.nbytes
    formula = f"2(N-1)/N of {nbytes:,} bytes of x, of dX, and of the norm's dW"
    sends(sent, formula, 2 * (size - 1) / size * nbytes, group)
