"""Features and all gradients are slices of those of the whole layer."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole layer on every rank
    full = nn.Linear(6, 8).double()
    layer = ColumnParallelLinear(full)
    x, grad = (randn(3, 5, n, seed=n, dtype=torch.float64) for n in (6, 8))
    whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = full(whole)
    y.backward(grad)
    with Sent() as sent:
        out = layer(mine)
        out.backward(grad.chunk(size, -1)[rank])
    same("a quarter of the features", out, y.chunk(size, -1)[rank], 1e-12)
    for name, mine_grad, grads in (
        ("a quarter of dW", gradient(layer.weight), gradient(full.weight).chunk(size)),
        ("a quarter of db", gradient(layer.bias), gradient(full.bias).chunk(size)),
    ):
        same(name, mine_grad, grads[rank], 1e-12)
    same("all of dX", gradient(mine), gradient(whole), 1e-12)
    sends(
        sent, f"2(N-1)/N of {x.nbytes:,} bytes of dX", 2 * (size - 1) / size * x.nbytes
    )
