"""The two matmuls of tensor parallelism, with their communication inside.

    column: the weight's rows (output features) are split      row: its columns (inputs)

               x replicated                                     x split
                    |  f                                           |
        +-----------+-----------+                      +-----------+-----------+
      x W0^T      x W1^T      x W2^T                 x0 W0^T     x1 W1^T     x2 W2^T
        |           |           |                      +-----------+-----------+
                 y split                                           |  g: the sum
                                                             y replicated

Forward, a column multiplication sends nothing and a row one sums its outputs; backward,
the column's input gradient is summed and the row's needs nothing. With `sequence_dim`
the replicated tensor is split along that dim instead, so f becomes all-gather forward
and reduce-scatter backward, and g the other way round.

Why these are functions of their own rather than f and g around `F.linear`: the sum of
dX can run while dW is computed, several weights that read the same x share one sum,
the row's output is summed where it lies, and a gathered x need not be kept until
backward (it is gathered once more, while dX is computed, or later with dW).

For M elements of x (or y), N ranks: an all-reduce sends 2(N-1)/N M elements a rank, an
all-gather or a reduce-scatter half of that.

Sources: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022.

Shapes: K input features, O output features; any dims before them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import (
    all_gather_async,
    gather,
    join,
    reduce_scatter_async,
)
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.deferred import Deferral, deferral
from xtrain.comm.work import Work
from xtrain.tensor_parallel.autocast import as_autocast
from xtrain.tensor_parallel.ring_matmul import (
    ring_all_gather_matmul,
    ring_matmul_reduce_scatter,
)

Overlap = bool | Literal["ring"]


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    sequence_dim: int | None = None,
    overlap: Overlap = True,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, ...]:
    """`x W^T` for each of this rank's row slices `weights`: [..., K] to [..., O / N].

    Args:
        x: replicated, or with `sequence_dim` this rank's slice of that dim.
        weights: slices [O / N, K] of one or more layers that read the same x.
        overlap: sum dX while the gradients of the weights are computed; the
            numbers are the same either way. "ring": with `sequence_dim`,
            gather and multiply piece by piece (`ring_matmul`).
    """
    x, *weights = as_autocast(x, *weights)
    if overlap == "ring" and sequence_dim is not None:
        return ring_all_gather_matmul(x, weights, sequence_dim, group)
    dim = None if sequence_dim is None else sequence_dim % x.dim()
    later, weights = deferral(*weights)
    return _ColumnLinear.apply(x, dim, overlap, group, later, *weights)


def row_linear(
    x: Tensor,
    weight: Tensor,
    sequence_dim: int | None = None,
    overlap: Overlap = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The sum over ranks of `x W^T`: [..., K / N] to [..., O] on every rank.

    Args:
        x: this rank's slice of the features.
        weight: this rank's column slice, [O, K / N].
        sequence_dim: return only this rank's slice of that dim.
        overlap: "ring": with `sequence_dim`, multiply and sum piece by piece
            (`ring_matmul`); True and False are the same here.
    """
    x, weight = as_autocast(x, weight)
    if overlap == "ring" and sequence_dim is not None:
        return ring_matmul_reduce_scatter(x, weight, sequence_dim, group)
    dim = None if sequence_dim is None else sequence_dim % x.dim()
    later, (weight,) = deferral(weight)
    return _RowLinear.apply(x, weight, dim, group, later)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int | None,
        overlap: bool,
        group: ProcessGroup | None,
        later: Deferral | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.dim, ctx.overlap, ctx.group, ctx.later = dim, overlap, group, later
        whole = x if dim is None else gather(x, dim, group)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dim, group = ctx.dim, ctx.group
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        if ctx.later is not None:
            compute = partial(_column_weight_gradients, dim, group)
            ctx.later.add(compute, x, *grads)
            needs_weights = [False] * len(weights)
        if dim is not None and any(needs_weights):
            stacked, gathered = all_gather_async(x, group)  # while dX is computed
        grad_x, summed = None, Work()
        if needs_x:
            grad_x, summed = _sum_async(_input_gradient(grads, weights), dim, group)
            if not ctx.overlap:
                summed.wait()
        if dim is not None and any(needs_weights):
            gathered.wait()
            x = join(stacked, dim)
        grad_weights = [
            _weight_gradient(grad, x) if needed else None
            for grad, needed in zip(grads, needs_weights, strict=True)
        ]
        summed.wait()
        return grad_x, None, None, None, None, *grad_weights


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dim: int | None,
        group: ProcessGroup | None,
        later: Deferral | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group, ctx.later = dim, group, later
        total, summed = _sum_async(F.linear(x, weight), dim, group)
        summed.wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.dim is not None:
            grad = gather(grad, ctx.dim, ctx.group)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad @ weight if needs_x else None
        grad_weight = None
        if ctx.later is not None:
            ctx.later.add(_row_weight_gradient, x, grad)
        elif needs_weight:
            grad_weight = _weight_gradient(grad, x)
        return grad_x, grad_weight, None, None, None


def _sum_async(
    partial: Tensor, dim: int | None, group: ProcessGroup | None
) -> tuple[Tensor, Work]:
    """Begin to sum a tensor that nothing else uses: whole, or this rank's slice."""
    if dim is not None:
        return reduce_scatter_async(partial, dim, group)
    partial = partial.contiguous()
    return partial, TORCH.all_reduce(partial, group=group)


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """dX of all y = x W^T that read the same x, added up by the matmuls themselves."""
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    total = rows[0] @ weights[0]
    for grad, weight in zip(rows[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total.view(*grads[0].shape[:-1], weights[0].shape[1])


def _column_weight_gradients(
    dim: int | None, group: ProcessGroup | None, x: Tensor, *grads: Tensor
) -> list[Tensor]:
    """dW of all weights that read x, of which a slice is kept until here."""
    whole = x if dim is None else gather(x, dim, group)
    return [_weight_gradient(grad, whole) for grad in grads]


def _row_weight_gradient(x: Tensor, grad: Tensor) -> list[Tensor]:
    return [_weight_gradient(grad, x)]


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dW [O, K] of y = x W^T, over all dims before the features."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def gradients_by_autograd(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """A backward that can be differentiated again: that of torch's own functions."""
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    out = function(*inputs)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
