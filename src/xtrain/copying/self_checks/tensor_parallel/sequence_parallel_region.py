"""Norm and MLP on a quarter of the sequence equal those of one process."""

import copy

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.sequence_parallel_region import (
    SequenceParallelRegion,
)


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole model on every rank
    norm, up, down = nn.RMSNorm(6), nn.Linear(6, 8, bias=False), nn.Linear(8, 6, False)
    full = nn.Sequential(norm, up, nn.Tanh(), down).double()
    mine_up, mine_down = (nn.Linear(*n, False).double() for n in ((6, 2), (2, 6)))
    with torch.no_grad():
        norm.weight.copy_(randn(6, seed=5))
        mine_up.weight.copy_(up.weight.chunk(size, 0)[rank])
        mine_down.weight.copy_(down.weight.chunk(size, 1)[rank])
    block = nn.Sequential(mine_up, nn.Tanh(), mine_down)
    mine_norm = copy.deepcopy(norm)
    region = SequenceParallelRegion(mine_norm, block)

    x, grad = (randn(3, 8, 6, seed=n, dtype=torch.float64) for n in (1, 2))
    whole = x.clone().requires_grad_()
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    y = whole + full(whole)
    y.backward(grad)
    with Sent() as sent:
        out = region(mine)
        out.backward(grad.chunk(size, 1)[rank])
    same("a quarter of the sequence", out, y.chunk(size, 1)[rank], 1e-12)
    same("a quarter of dX", gradient(mine), gradient(whole).chunk(size, 1)[rank], 1e-12)
    same(
        "all of the norm's dW",
        gradient(mine_norm.weight),
        gradient(norm.weight),
        1e-12,
    )
    part = gradient(up.weight).chunk(size, 0)[rank]
    same("a quarter of the first dW", gradient(mine_up.weight), part, 1e-12)
    part = gradient(down.weight).chunk(size, 1)[rank]
    same("a quarter of the second dW", gradient(mine_down.weight), part, 1e-12)
    nbytes = 2 * x.nbytes + norm.weight.nbytes
    formula = f"2(N-1)/N of {nbytes:,} bytes of x, of dX, and of the norm's dW"
    sends(sent, formula, 2 * (size - 1) / size * nbytes)
