"""Features and all gradients are slices of those of the whole layer."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    for bias, shape in ((True, (3, 5)), (False, (7,)), (True, ())):
        torch.manual_seed(0)  # the same whole layer on every rank
        full = nn.Linear(6, 24, bias)
        layer = form(full)
        x, grad = (randn(*shape, n, seed=n) for n in (6, 24))
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = full(whole)
            y.backward(grad)
            with Sent() as ahead:
                out = layer(mine)
            with Sent() as back:
                out.backward(grad.chunk(size, -1)[rank])
        same(f"its part of the features, bias={bias}", out, y.chunk(size, -1)[rank])
        for name, parameter in layer.named_parameters():
            part = gradient(full.get_parameter(name)).chunk(size)[rank]
            same(f"its part of the gradient of {name}", gradient(parameter), part)
        same("all of dX", gradient(mine), gradient(whole))
        sends(ahead, "nothing forward", 0)
        sends(back, "backward 2(N-1)/N of x", 2 * (size - 1) / size * x.nbytes)
