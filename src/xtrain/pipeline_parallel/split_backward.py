"""Backward in two parts: gradients of inputs now, gradients of weights later.

    F    y = x W^T            for every linear layer of the stage
    B    dx = dy W            from the last layer to the first; x and dy are kept
    W    dW = dy^T x          at any time after; x and dy are freed

The stage before waits for dx, and only the optimizer waits for dW. Each part is
as long as a forward: three matmuls of the same size, none of them computed twice.

The model's code stays as it is. While its forward runs, a mode of torch's sees every
call; one that multiplies with a parameter becomes a function of ours, whose backward
returns dx and queues the rest. Norms and embeddings have their weights' gradients
computed in B: those need no matmul.

A queued call keeps x and dy: for a linear layer from K to O features, K + O numbers a
token; layers that read the same x share it.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import _make_grads
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, _engine_run_backward

from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.deferred import Deferral, DeferredGradients

Outputs = Tensor | GradientEdge | Sequence[Tensor] | Sequence[GradientEdge]


class SplitBackward(DeferredGradients):
    """The backward of one forward, in two parts.

    `with split_backward() as split:` around the forward, then either `backward_input`
    and, at any time, `backward_weight`, or `backward`, which is both.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = "input"  # then "weight", then "nothing"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and func in CALLS:
            called = CALLS[func](*args, **kwargs)
            if called is not None and called[1].requires_grad:
                x, *weights = cast_by_autocast(*called)
                later, places = self.deferral(*weights)
                if later is not None:
                    return _Linear.apply(later, x, *places)
        return func(*args, **kwargs)

    def backward_input(
        self,
        outputs: Outputs,
        gradients: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """`torch.autograd.backward`, without the gradients of weights in matmuls."""
        if self._next != "input":
            raise RuntimeError(
                f"backward_input was called before: what comes next is {self._next}"
            )
        self._next, self.deferring = "nothing", True
        try:
            run_backward(self, outputs, gradients)
        except BaseException:
            self.queue.clear()
            raise
        finally:
            self.deferring = False
        self._next = "weight"

    def backward_weight(self) -> None:
        """The gradients that `backward_input` left, added to those of the parameters.

        Hooks of the parameters run here, once.
        """
        if self._next != "weight":
            raise RuntimeError(
                "backward_weight comes once, after backward_input: "
                f"what comes next is {self._next}"
            )
        self._next = "nothing"
        try:
            self.compute_deferred()
        finally:
            self.queue.clear()

    def backward(
        self,
        outputs: Outputs,
        gradients: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Both parts at once. (A plain forward needs no mode for that.)"""
        self.backward_input(outputs, gradients)
        self.backward_weight()


def run_backward(
    mode: DeferredGradients,
    outputs: Outputs,
    gradients: Tensor | Sequence[Tensor | None] | None,
) -> None:
    """`torch.autograd.backward` with `mode` active in it, also in autograd's threads.

    A checkpoint computes its forward again, and must call the same functions. (Torch's
    own call would be handled by the mode, which is inactive while it handles one.)
    """
    single = isinstance(outputs, Tensor | GradientEdge)
    roots: Any = (outputs,) if single else tuple(outputs)
    if gradients is None:
        gradients = [None] * len(roots)
    given = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    given = _make_grads(roots, given, is_grads_batched=False)
    with mode:
        _engine_run_backward(
            roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def split_backward() -> SplitBackward:
    """The context for one forward whose backward will come in two parts."""
    return SplitBackward()


def of_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """x, W [O, K] and the bias if there is one, of a call of `F.linear`."""
    return (input, weight) if bias is None else (input, weight, bias)


def of_matmul(x: Tensor, other: Any, **options: Any) -> tuple[Tensor, ...] | None:
    """The same of `x @ other`; None if that is not a linear layer."""
    if options or not isinstance(other, Tensor) or other.dim() != 2:
        return None
    return x, other.t()


def of_addmm(
    bias: Tensor, x: Tensor, other: Tensor, **options: Any
) -> tuple[Tensor, ...] | None:
    """The same of `bias + x @ other`."""
    if options or bias.dim() != 1 or len(bias) != other.shape[1]:
        return None
    return x, other.t(), bias


CALLS: dict[Any, Callable[..., tuple[Tensor, ...] | None]] = {
    F.linear: of_linear,
    torch.addmm: of_addmm,
    Tensor.addmm: of_addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), of_matmul),
    Tensor.__matmul__: of_matmul,
}
"""What a mode sees where a model multiplies with a weight."""


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward leaves dW and db to `later`."""

    @staticmethod
    def forward(ctx: Any, later: Deferral, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights[0])
        ctx.later, ctx.nones = later, [None] * len(weights)
        return F.linear(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        compute = weight_gradient if len(ctx.nones) == 1 else weight_and_bias_gradients
        ctx.later.add(compute, x, grad)
        return None, grad @ weight if ctx.needs_input_grad[1] else None, *ctx.nones


def weight_gradient(x: Tensor, grad: Tensor) -> tuple[Tensor]:
    """dW [O, K], over all dims before the features."""
    return (grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]),)


def weight_and_bias_gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dW [O, K] and db [O]."""
    return *weight_gradient(x, grad), grad.reshape(-1, grad.shape[-1]).sum(0)
