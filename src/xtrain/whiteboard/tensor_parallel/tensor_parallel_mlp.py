"""SwiGLU cut over the ranks: one all-reduce forward, and one backward.

    x -> f -> gate, up: columns -> silu(gate) * up -> down: rows -> g -> y
    whole     split: this rank's share of the inner size             whole

Computes:   `full(x)` on every rank; backward, this rank's part of each dW, all of dX.
Sends:      forward 2(N-1)/N of y, for g; backward 2(N-1)/N of x, for f.
Leaves out: biases, slices of the sequence, overlap of the sums, uneven sizes, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class TensorParallelMLP(nn.Module):
    """Parts of a module with gate_proj, up_proj and down_proj, all without bias."""

    def __init__(self, full: Any, group: Any = None):
        super().__init__()
        self.group = group
        self.gate_proj = self._my_part(full.gate_proj, dim=0)
        self.up_proj = self._my_part(full.up_proj, dim=0)
        self.down_proj = self._my_part(full.down_proj, dim=1)

    def _my_part(self, full: nn.Linear, dim: int) -> nn.Parameter:
        parts = full.weight.detach().chunk(dist.get_world_size(self.group), dim)
        return nn.Parameter(parts[dist.get_rank(self.group)].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = _IdentityAllReduce.apply(x, self.group)  # f, once: gate and up share it
        inner = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        y = F.linear(inner, self.down_proj)  # a part of each y
        return _AllReduceIdentity.apply(y, self.group)  # g


class _IdentityAllReduce(torch.autograd.Function):
    """f: each rank has used x for other inner features, so each has a part of dX."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduceIdentity.apply(grad, ctx.group), None


class _AllReduceIdentity(torch.autograd.Function):
    """g: y is the sum, and every part of a sum has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _IdentityAllReduce.apply(grad, ctx.group), None
