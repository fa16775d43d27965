"""Row-parallel linear: each rank multiplies its share of the input features.

    x split -> x_r W_r^T, a part of every feature -> g -> y whole   W is cut along dim 1

Computes:   `full(x)` on every rank; backward, this rank's part of dW and of dX.
Sends:      forward 2(N-1)/N of y, because g sums the ranks' parts; nothing backward.
Leaves out: splitting a whole input, reduce-scatter of the sum, uneven sizes, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RowParallelLinear(nn.Module):
    """Its input is the split output of a column-parallel layer."""

    def __init__(self, full: nn.Linear, group: Any = None):
        super().__init__()
        self.group = group
        # nn.Linear stores [out, in], so the rows of y = x A are dim 1 of its weight.
        parts = full.weight.detach().chunk(dist.get_world_size(group), dim=1)
        self.weight = nn.Parameter(parts[dist.get_rank(group)].clone())
        bias = None if full.bias is None else full.bias.detach().clone()
        self.bias = None if bias is None else nn.Parameter(bias)  # whole on every rank

    def forward(self, x: Tensor) -> Tensor:
        y = _AllReduceIdentity.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # once, so after the sum


class _AllReduceIdentity(torch.autograd.Function):
    """g: y is the sum, and every part of a sum has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
