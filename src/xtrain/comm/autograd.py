"""Collectives that autograd can differentiate: each with the one its backward runs.

Torch's own collectives are invisible to autograd: put one into a forward pass, and the
gradient of everything before it is silently lost. Here each is a
`torch.autograd.Function` named by what it does forward and backward.

    function                   forward         backward        before -> after
    identity_all_reduce (f)    nothing         all-reduce      replicated -> replicated
    all_reduce_identity (g)    all-reduce      nothing         partial -> replicated
    split_all_gather           keep my slice   all-gather      replicated -> split
    all_gather_split           all-gather      keep my slice   split -> replicated
    all_gather_reduce_scatter  all-gather      reduce-scatter  split -> replicated
    reduce_scatter_all_gather  reduce-scatter  all-gather      partial -> split

Replicated: equal on all ranks. Partial: the value is the sum over ranks. Split: each
rank holds its slice of one dim. Which of two functions with the same forward is right
depends on the gradient that comes back: `identity_all_reduce` and
`all_gather_reduce_scatter` are for an output of which each rank uses another part (its
gradient is partial), `all_gather_split` is for one that all ranks use equally (its
gradient is replicated). Two functions that swap forward and backward are duals: f and
g, `split_all_gather` and `all_gather_split`, `all_gather_reduce_scatter` and
`reduce_scatter_all_gather`. Each backward is its dual's forward, so second derivatives
are right, too.

None writes into its input or into the gradient it is given: a residual connection may
use either once more.

Source: Shoeybi et al., Megatron-LM, 2019 (f and g); Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022 (the last two).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, default_collectives
from xtrain.comm.p2p import exchange_all
from xtrain.comm.work import Work


def identity_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """f: `x` itself; backward sums the gradients of all ranks.

    Stands where a replicated tensor enters a region in which each rank computes another
    part of the result.
    """
    return _IdentityAllReduce.apply(x, group)


def identity_all_reduce_wide(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """f for a small weight: 16-bit gradients are sent and summed in at least fp32."""
    return _IdentityAllReduceWide.apply(x, group)


class _IdentityAllReduceWide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        return all_reduce_identity(grad.to(wide), ctx.group).to(grad.dtype), None


def all_reduce_identity(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """g: the sum of all ranks' `x`; backward returns the gradient unchanged.

    Stands where the ranks' partial results become one replicated tensor.
    """
    return _AllReduceIdentity.apply(x, group)


def split_all_gather(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice of a replicated `x`; backward gathers the slices' gradients.

    Raises:
        ValueError: the dim's size is not divisible by the group's.
    """
    return _SplitAllGather.apply(x, _checked_dim("split_all_gather", x, dim), group)


def all_gather_split(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """All ranks' `x` along `dim`; backward keeps this rank's slice of the gradient.

    For an output that all ranks use equally: their gradients must be equal.
    """
    return _AllGatherSplit.apply(x, _checked_dim("all_gather_split", x, dim), group)


def all_gather_reduce_scatter(
    x: Tensor, dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """All ranks' `x` along `dim`; backward sums the gradients, each rank its slice.

    For what each rank uses for another part of the result.
    """
    dim = _checked_dim("all_gather_reduce_scatter", x, dim)
    return _AllGatherReduceScatter.apply(x, dim, group)


def reduce_scatter_all_gather(
    x: Tensor, dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's slice of the sum of all ranks' `x`; backward gathers the gradients.

    Raises:
        ValueError: the dim's size is not divisible by the group's.
    """
    dim = _checked_dim("reduce_scatter_all_gather", x, dim)
    return _ReduceScatterAllGather.apply(x, dim, group)


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_identity(grad, ctx.group), None


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        total, work = all_reduce_async(x, group)
        work.wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return identity_all_reduce(grad, ctx.group), None


class _SplitAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return slice_of(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_split(grad, ctx.dim, ctx.group), None, None


class _AllGatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return split_all_gather(grad, ctx.dim, ctx.group), None, None


class _AllGatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_all_gather(grad, ctx.dim, ctx.group), None, None


class _ReduceScatterAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        part, work = reduce_scatter_async(x, dim, group)
        work.wait()
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_reduce_scatter(grad, ctx.dim, ctx.group), None, None


def identity_sum(
    x: Tensor, members: Sequence[int], group: ProcessGroup | None = None
) -> Tensor:
    """f among some ranks of the group: backward sums the gradients of `members`.

    For a weight that these ranks replicate and use differently. They send one
    another their gradients, so no group of their own is needed, and add them up in rank
    order, so all get the same bits. Its second derivative is not defined.

    Args:
        members: ranks in `group`, this one among them; the same list on all of them.
    """
    return _IdentitySum.apply(x, list(members), group)


class _IdentitySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, members: list[int], group: ProcessGroup | None
    ) -> Tensor:
        ctx.members, ctx.group = members, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_among(grad, ctx.members, ctx.group), None, None


def sum_among(
    x: Tensor, members: Sequence[int], group: ProcessGroup | None = None
) -> Tensor:
    """The sum of `members`, which are ranks of the group: each sends its own to all."""
    rank, _ = rank_and_size(group)
    parts = x.new_empty(len(members), *x.shape)
    by_rank = dict(zip(members, parts, strict=True))
    mine = by_rank.pop(rank).copy_(x)
    exchange_all(
        [(mine, member) for member in by_rank],
        [(part, member) for member, part in by_rank.items()],
        group,
    )
    return parts.sum(0)


def slice_of(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """A view of this rank's slice; ValueError if the dim does not divide."""
    rank, size = rank_and_size(group)
    check_divides(f"dim {dim} of {list(x.shape)}", x.shape[dim], size)
    part = x.shape[dim] // size
    return x.narrow(dim, rank * part, part)


def check_divides(what: str, length: int, size: int) -> None:
    """ValueError unless `size` ranks can hold equal slices."""
    if length % size:
        raise ValueError(f"{what}: {length} is not divisible by {size}")


def all_reduce_async(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Work]:
    """Begin the sum over ranks, in a tensor of its own."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if rank_and_size(group)[1] == 1:
        return total, Work()
    return total, TORCH.all_reduce(total, group=group)


def all_gather_async(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Work]:
    """Begin to collect all ranks' `x`, stacked: [N, *x.shape] after the wait."""
    size = rank_and_size(group)[1]
    mine = x.detach().contiguous()
    stacked = mine.new_empty(size, *mine.shape)
    collectives = default_collectives(group, x.device)
    work = collectives.all_gather(stacked.view(-1), mine.view(-1), group=group)
    return stacked, Work([work], keep=mine)


def join(stacked: Tensor, dim: int) -> Tensor:
    """[N, ...] as one tensor with the pieces along `dim`; along dim 0 a view."""
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


def gather(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """All ranks' `x` along `dim`, in a tensor of its own."""
    stacked, work = all_gather_async(x, group)
    work.wait()
    return join(stacked, dim)


def reduce_scatter_async(
    x: Tensor, dim: int, group: ProcessGroup | None
) -> tuple[Tensor, Work]:
    """Begin to sum all ranks' `x`, of which this rank gets its slice of `dim`."""
    size = rank_and_size(group)[1]
    check_divides(f"dim {dim} of {list(x.shape)}", x.shape[dim], size)
    slices = x.detach().chunk(size, dim)
    stacked = x.detach() if dim == 0 else torch.cat(slices, 0)
    output = torch.empty_like(slices[0], memory_format=torch.contiguous_format)
    stacked = stacked.contiguous()
    collectives = default_collectives(group, x.device)
    work = collectives.reduce_scatter(output.view(-1), stacked.view(-1), group=group)
    return output, Work([work], keep=stacked)


def _checked_dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}: dim={dim}, but the tensor is {list(x.shape)}")
    return dim % x.dim()
