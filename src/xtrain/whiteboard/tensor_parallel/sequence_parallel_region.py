"""Sequence-parallel region: a norm on slices of the sequence, a block on the whole.

    x split -> norm -> all-gather -> block -> reduce-scatter -> + x split

Computes:   this rank's slice of `x + block(norm(x))`; backward, of dX; all of d(norm).
Sends:      2(N-1)/N of the whole x forward; backward too, and of the norm's weights.
Leaves out: dropout, a bias of the row layer, gathering again in backward, uneven sizes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class SequenceParallelRegion(nn.Module):
    """The block, column and row layers without f and g, returns a part of a sum.

    A bias of its row layer would be added N times, once on every rank: keep it out of
    the block, add it to this rank's slice, and sum its gradient as the norm's.
    """

    def __init__(self, norm: nn.Module, block: nn.Module, group: Any = None):
        super().__init__()
        self.norm, self.block, self.group = norm, block, group
        for parameter in norm.parameters():  # its gradient is of this rank's tokens
            parameter.register_hook(self._sum)

    def _sum(self, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def forward(self, x: Tensor) -> Tensor:
        """[B, S / N, H] in and out."""
        whole = _AllGather.apply(self.norm(x), self.group)
        part = self.block(whole)  # of the sum over the ranks, for the whole sequence
        return x + _ReduceScatter.apply(part, self.group)


class _AllGather(torch.autograd.Function):
    """The slices become the whole sequence; backward, parts of dX are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        slices = x.new_empty(size * len(x), *x.shape[1:])  # one after the other
        _all_gather(slices, x.contiguous(), group=group)
        return torch.cat(slices.chunk(size), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """This rank's slice of the sum; backward, all ranks' slices of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        slices = torch.cat(x.chunk(size, dim=1))
        mine = torch.empty_like(slices[: len(x)])
        _reduce_scatter(mine, slices, group=group)
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(grad, ctx.group), None
