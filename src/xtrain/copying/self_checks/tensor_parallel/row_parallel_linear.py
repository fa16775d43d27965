"""The output is the whole layer's, the gradients are slices of its gradients."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.row_parallel_linear import RowParallelLinear


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole layer on every rank
    full = nn.Linear(8, 6).double()
    layer = RowParallelLinear(full)
    x, grad = (randn(3, 5, n, seed=n, dtype=torch.float64) for n in (8, 6))
    whole = x.clone().requires_grad_()
    mine = x.chunk(size, -1)[rank].clone().requires_grad_()
    y = full(whole)
    y.backward(grad)
    with Sent() as sent:
        out = layer(mine)
        out.backward(grad)
    same("all features, the bias added once", out, y, 1e-12)
    part = gradient(full.weight).chunk(size, 1)[rank]
    same("a quarter of dW", gradient(layer.weight), part, 1e-12)
    same("all of db", gradient(layer.bias), gradient(full.bias), 1e-12)
    same(
        "a quarter of dX", gradient(mine), gradient(whole).chunk(size, -1)[rank], 1e-12
    )
    sends(
        sent, f"2(N-1)/N of {y.nbytes:,} bytes of y", 2 * (size - 1) / size * y.nbytes
    )
