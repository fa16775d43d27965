"""The output is the whole layer's, the gradients are slices of its gradients."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    for bias, shape in ((True, (3, 5)), (False, (7,)), (True, ())):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = nn.Linear(24, 6, bias)
        layer = form(full)
        x, grad = (randn(*shape, n, seed=n) for n in (24, 6))
        whole = x.clone().requires_grad_()
        mine = x.chunk(size, -1)[rank].clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = full(whole)
            y.backward(grad)
            with Sent() as ahead:
                out = layer(mine)
            with Sent() as back:
                out.backward(grad)
        same(f"all features, bias={bias} added once", out, y)
        part = gradient(full.weight).chunk(size, 1)[rank]
        same("its part of dW", gradient(layer.weight), part)
        if bias:
            same("all of db", gradient(layer.bias), gradient(full.bias))
        same("its part of dX", gradient(mine), gradient(whole).chunk(size, -1)[rank])
        sends(ahead, "forward 2(N-1)/N of y", 2 * (size - 1) / size * y.nbytes)
        sends(back, "nothing backward", 0)
