"""Sequence-parallel matmuls in pieces: one is passed around a ring while one is used.

    column:  y = all_gather(x) W^T        rank r of 4, which holds x_r

        on its way to rank r + 1     x_r       x_r-1       x_r-2
        multiplied meanwhile         x_r W^T   x_r-1 W^T   x_r-2 W^T   x_r-3 W^T

    row:     y_r = sum over ranks of (x W^T)_r

        on its way to rank r + 1               r-1         r-1 and r-2 of ...
        computed meanwhile           part r-1  part r-2    part r-3    part r

A step waits only if its transfer takes longer than its matmul. Backward is made of the
same two: the column's dX is a row, the row's dX a column, and dW is a sum over the
pieces that arrive. Each all-gather and each reduce-scatter sends (N-1)/N of the whole,
as one call would, and a rank never holds the whole x. The price: N matmuls of S / N
tokens instead of one, inefficient for small sizes, and a rounding of 16-bit sums on
every rank, as in any ring.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition
in Large Deep Learning Models, 2023.

Shapes: K input features, O output features, S sequence, N ranks; any dims before S.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.autograd import check_divides
from xtrain.comm.calls import check_call
from xtrain.comm.checks import rank_and_size
from xtrain.comm.deferred import Deferral, deferral
from xtrain.comm.reduce_op import fold_into
from xtrain.comm.ring_pass import RingPass


def ring_all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], dim: int, group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """`all_gather(x) W^T` for each weight; backward reduce-scatters dX in pieces, too.

    Args:
        x: this rank's slice of the sequence, [..., S / N, K].
        weights: this rank's rows [O / N, K] of one or more layers that read x.
        dim: the sequence dim of x.
    """
    dim = checked("ring_all_gather_matmul", x, dim, group)
    later, weights = deferral(*weights)
    return _RingColumnLinear.apply(x, dim, group, later, *weights)


def ring_matmul_reduce_scatter(
    x: Tensor, weight: Tensor, dim: int, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's slice of the sum of `x W^T`; backward gathers dY piece by piece.

    Args:
        x: the whole sequence, this rank's features, [..., S, K / N].
        weight: this rank's columns, [O, K / N].
        dim: the sequence dim of x; a multiple of N.
    """
    name, size = "ring_matmul_reduce_scatter", rank_and_size(group)[1]
    dim = checked(name, x, dim, group)
    check_divides(f"{name}: dim {dim} of {list(x.shape)}", x.shape[dim], size)
    later, (weight,) = deferral(weight)
    return _RingRowLinear.apply(x, weight, dim, group, later)


def ring_sum(
    part: Callable[[int], Tensor], group: ProcessGroup | None = None
) -> Tensor:
    """The sum over ranks of `part(r)`, on rank r; a part is computed when it is due.

    The sum for rank r starts at rank r + 1, and every rank adds its part.
    """
    ring = RingPass(group)
    total = part((ring.rank - 1) % ring.size).contiguous()
    for step in range(1, ring.size):
        arriving = ring.pass_on(total)  # issue
        mine = part((ring.rank - 1 - step) % ring.size)  # compute
        ring.wait()
        total = arriving
        fold_into(total, mine, ReduceOp.SUM)
    return total


class _RingColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        group: ProcessGroup | None,
        later: Deferral | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.dim, ctx.group, ctx.later = dim, group, later
        outputs = {
            rank: [F.linear(piece, weight) for weight in weights]
            for rank, piece in RingPass(group).visits(x)
        }
        return tuple(in_rank_order(outputs, dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dim, group, size = ctx.dim, ctx.group, rank_and_size(ctx.group)[1]
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        slices = [grad.chunk(size, dim) for grad in grads]

        def grad_x_of(rank: int) -> Tensor:
            partial = slices[0][rank] @ weights[0]
            for grad, weight in zip(slices[1:], weights[1:], strict=True):
                partial += grad[rank] @ weight
            return partial

        grad_x = ring_sum(grad_x_of, group) if needs_x else None
        if ctx.later is not None:
            compute = partial(column_weight_gradients, dim, group, needs_weights)
            ctx.later.add(compute, x, *grads)
            return grad_x, None, None, None, *[None] * len(weights)
        grad_weights = column_weight_gradients(dim, group, needs_weights, x, *grads)
        return grad_x, None, None, None, *grad_weights


class _RingRowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dim: int,
        group: ProcessGroup | None,
        later: Deferral | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group, ctx.later = dim, group, later
        slices = x.chunk(rank_and_size(group)[1], dim)
        return ring_sum(lambda rank: F.linear(slices[rank], weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if ctx.later is not None:
            needs_weight = False
        slices = x.chunk(rank_and_size(ctx.group)[1], ctx.dim)
        pieces: dict[int, Tensor] = {}  # of dY, as they came
        grad_x: dict[int, list[Tensor]] = {}
        grad_weight: Tensor | None = None
        for rank, piece in RingPass(ctx.group).visits(grad):
            if needs_x:
                grad_x[rank] = [piece @ weight]
            if needs_weight:
                grad_weight = add_weight_gradient(grad_weight, piece, slices[rank])
            elif ctx.later is not None:
                pieces[rank] = piece
        if ctx.later is not None:
            compute = partial(row_weight_gradient, ctx.dim, list(pieces))
            ctx.later.add(compute, x, *pieces.values())
        whole = in_rank_order(grad_x, ctx.dim)[0] if needs_x else None
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return whole, grad_weight, None, None, None


def row_weight_gradient(
    dim: int, ranks: Sequence[int], x: Tensor, *pieces: Tensor
) -> list[Tensor]:
    """dW, from the pieces of dY of these ranks."""
    slices, total = x.chunk(len(ranks), dim), None
    for rank, piece in zip(ranks, pieces, strict=True):
        total = add_weight_gradient(total, piece, slices[rank])
    return [] if total is None else [total.to(x.dtype)]


def column_weight_gradients(
    dim: int,
    group: ProcessGroup | None,
    needed: Sequence[bool],
    x: Tensor,
    *grads: Tensor,
) -> list[Tensor | None]:
    """dW of all weights that read x; the pieces of x take the ring once more."""
    slices = [grad.chunk(rank_and_size(group)[1], dim) for grad in grads]
    totals: list[Tensor | None] = [None] * len(grads)
    for rank, piece in RingPass(group).visits(x) if any(needed) else ():
        for number in (n for n, is_needed in enumerate(needed) if is_needed):
            grad = slices[number][rank]
            totals[number] = add_weight_gradient(totals[number], grad, piece)
    return [t if t is None else t.to(x.dtype) for t in totals]


def add_weight_gradient(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """`total` plus dW [O, K] of one piece of y = x W^T; 16 bits add up in fp32."""
    part = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return total.add_(part)


def in_rank_order(pieces: dict[int, list[Tensor]], dim: int) -> list[Tensor]:
    """The ranks' results joined along `dim`, one tensor for each entry of a list."""
    ordered = [pieces[rank] for rank in sorted(pieces)]
    return [torch.cat(parts, dim) for parts in zip(*ordered, strict=True)]


def checked(name: str, x: Tensor, dim: int, group: ProcessGroup | None) -> int:
    """`dim` counted from the front; ValueError unless it is before the features."""
    holds = -x.dim() <= dim < x.dim() and dim % x.dim() != x.dim() - 1
    message = f"dim={dim} is not a dim before the features of {list(x.shape)}"
    check_call(name, group, x, rules=[(holds, message)], written=[])
    return dim % x.dim()
