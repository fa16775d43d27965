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
        x = _Sum.apply(x, False, self.group)  # f, once: gate and up share the sum of dX
        inner = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        return _Sum.apply(F.linear(inner, self.down_proj), True, self.group)  # g


class _Sum(torch.autograd.Function):
    """g sums forward, f sums backward: each does what the other's backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool, group: Any) -> Tensor:
        ctx.dual = not now, group
        if not now:
            return x.view_as(x)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, *ctx.dual), None, None
