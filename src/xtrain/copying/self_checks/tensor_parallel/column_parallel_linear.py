"""Features and all gradients are slices of those of the whole layer."""

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
from xtrain.whiteboard.tensor_parallel.column_parallel_linear import (
    ColumnParallelLinear,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for shape, bias in (((5,), True), ((3, size), False), ((1, 3 * size), True)):
        low, exact = in_both(nn.Linear(2 * size, 3 * size, bias), dtype)
        layer = ColumnParallelLinear(low, group)
        x = randn(*shape, 2 * size, seed=1, dtype=dtype)
        grad = randn(*shape, 3 * size, seed=2, dtype=dtype)
        whole, mine = (
            x.to(torch.float64, copy=True).requires_grad_(),
            x.clone().requires_grad_(),
        )
        for _ in range(2):  # gradients add up
            y = exact(whole)
            y.backward(grad.double())
            with Sent(group) as sent:
                out = layer(mine)
                out.backward(grad.chunk(size, -1)[rank])
        near(f"features of {shape}", out, y.chunk(size, -1)[rank], dtype, group)
        near("all of dX", gradient(mine), gradient(whole), dtype, group)
        for name, parameter in layer.named_parameters():
            part = gradient(exact.get_parameter(name)).chunk(size)[rank]
            near(f"a part of d{name}", gradient(parameter), part, dtype, group)
    formula = f"2(N-1)/N of {x.nbytes:,} bytes of dX"
    sends(sent, formula, 2 * (size - 1) / size * x.nbytes, group)
