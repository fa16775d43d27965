"""Column-parallel linear: each rank computes its share of the output features.

    x whole on every rank -> f -> x W_r^T -> y split        W is cut along dim 0

Computes:   this rank's features of `full(x)`; backward, its part of dW and all of dX.
Sends:      nothing forward; backward 2(N-1)/N of x, because f sums the parts of dX.
Leaves out: a gathered output, overlap of the sum with dW, uneven sizes, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class ColumnParallelLinear(nn.Module):
    """What follows takes its features split: a row-parallel layer, in the end."""

    def __init__(self, full: nn.Linear, group: Any = None):
        super().__init__()
        self.group = group
        # nn.Linear stores [out, in], so the columns of y = x A are dim 0 of its weight.
        self.weight = self._my_part(full.weight)
        self.bias = None if full.bias is None else self._my_part(full.bias)

    def _my_part(self, full: Tensor) -> nn.Parameter:
        parts = full.detach().chunk(dist.get_world_size(self.group), dim=0)
        return nn.Parameter(parts[dist.get_rank(self.group)].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_IdentityAllReduce.apply(x, self.group), self.weight, self.bias)


class _IdentityAllReduce(torch.autograd.Function):
    """f: each rank has used x for other features, so each has a part of dX."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
