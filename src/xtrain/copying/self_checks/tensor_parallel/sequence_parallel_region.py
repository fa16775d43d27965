"""Norm and MLP on a part of the sequence equal those of one process."""

import copy
from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole model on every rank
    norm, up, down = (
        nn.RMSNorm(6),
        nn.Linear(6, 24, False),
        nn.Linear(24, 6, False),
    )
    full = nn.Sequential(norm, up, nn.Tanh(), down)
    each = 24 // size
    mine_up, mine_down = (nn.Linear(*n, False) for n in ((6, each), (each, 6)))
    with torch.no_grad():
        norm.weight.copy_(randn(6, seed=5))
        mine_up.weight.copy_(up.weight.chunk(size, 0)[rank])
        mine_down.weight.copy_(down.weight.chunk(size, 1)[rank])
    block = nn.Sequential(mine_up, nn.Tanh(), mine_down)
    mine_norm = copy.deepcopy(norm)
    region = form(mine_norm, block)

    x, grad = (randn(3, 24, 6, seed=n) for n in (1, 2))
    whole = x.clone().requires_grad_()
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    for _ in range(2):  # gradients add up
        y = whole + full(whole)
        y.backward(grad)
        with Sent() as ahead:
            out = region(mine)
        with Sent() as back:
            out.backward(grad.chunk(size, 1)[rank])
    same("its part of the sequence", out, y.chunk(size, 1)[rank])
    same("its part of dX", gradient(mine), gradient(whole).chunk(size, 1)[rank])
    same("all of the norm's dW", gradient(mine_norm.weight), gradient(norm.weight))
    part = gradient(up.weight).chunk(size, 0)[rank]
    same("its part of the first dW", gradient(mine_up.weight), part)
    part = gradient(down.weight).chunk(size, 1)[rank]
    same("its part of the second dW", gradient(mine_down.weight), part)
    ring, nbytes = 2 * (size - 1) / size, x.nbytes + norm.weight.nbytes
    sends(ahead, "2(N-1)/N of the whole x forward", ring * x.nbytes)
    sends(back, "backward too, and of the norm's weights", ring * nbytes)
