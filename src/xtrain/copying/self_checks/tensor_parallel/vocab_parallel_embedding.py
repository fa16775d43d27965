"""The output has the whole table's bits, the gradient is a part of its gradient."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole table on every rank
    each = 24 // size
    full = nn.Embedding(24, 6)
    layer = form(full)
    edges = [row for r in range(size) for row in (each * r, each * r + each - 1)]
    ids = torch.tensor([edges, edges[::-1]])  # the first and last row of each rank
    grad = randn(2, 2 * size, 6, seed=1)
    y = full(ids)
    y.backward(grad)
    with Sent() as ahead:
        out = layer(ids)
    with Sent() as back:
        out.backward(grad)
    same("the rows of all ids", out, y, 0)
    part = gradient(full.weight).chunk(size)[rank]
    same("the gradient of its part of the table", gradient(layer.weight), part)
    sends(ahead, "forward 2(N-1)/N of y", 2 * (size - 1) / size * y.nbytes)
    sends(back, "nothing backward", 0)
