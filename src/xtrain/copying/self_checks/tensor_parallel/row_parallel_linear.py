"""The output is the whole layer's, the gradients are slices of its gradients."""

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
from xtrain.whiteboard.tensor_parallel.row_parallel_linear import (
    RowParallelLinear,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for shape, bias in (((5,), True), ((3, size), False), ((1, 3 * size), True)):
        low, exact = in_both(nn.Linear(2 * size, 3 * size, bias), dtype)
        layer = RowParallelLinear(low, group)
        x = randn(*shape, 2 * size, seed=1, dtype=dtype)
        grad = randn(*shape, 3 * size, seed=2, dtype=dtype)
        whole = x.to(torch.float64, copy=True).requires_grad_()
        mine = x.chunk(size, -1)[rank].clone().requires_grad_()
        for _ in range(2):  # gradients add up
            y = exact(whole)
            y.backward(grad.double())
            with Sent(group) as sent:
                out = layer(mine)
                out.backward(grad)
        near(f"features of {shape}, the bias added once", out, y, dtype, group)
        part = gradient(whole).chunk(size, -1)[rank]
        near("a part of dX", gradient(mine), part, dtype, group)
        part = gradient(exact.weight).chunk(size, 1)[rank]
        near("a part of dW", gradient(layer.weight), part, dtype, group)
        if layer.bias is not None:
            db = gradient(exact.bias)
            near("all of db", gradient(layer.bias), db, dtype, group)
    formula = f"2(N-1)/N of {out.nbytes:,} bytes of y"
    sends(sent, formula, 2 * (size - 1) / size * out.nbytes, group)
