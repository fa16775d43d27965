"""Gradients of 16-bit parameters add up in fp32.

    backward 1     grad = g1          as autograd made it, 16 bits: nothing is lost yet
    backward 2     grad = fp32(g1) + g2, and fp32 from here on
    reduction      fp32 over the ranks
    result         grad = the sum, rounded once to what the optimizer takes

A bf16 sum has 8 bits: 256 + 1 is 256, so the 257th of equal gradients changes nothing.
fp16 has 11 bits, and ends at 65504. torch's Adam refuses a gradient whose dtype is not
the parameter's, so what a reduction leaves is rounded, and the fp32 sum is kept beside
it: the next backward adds to that. With `parameter.grad_dtype = torch.float32`, torch's
own switch, gradients stay in fp32. `MixedPrecisionOptimizer` sets it by `read_in_fp32`.

Costs 4 bytes a parameter. Parameters of fp32 and float64 are left alone, to the bit.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

LOW = (torch.float16, torch.bfloat16)


def accumulate_in_fp32(
    parameters: Iterable[Tensor], choice: bool | None = None
) -> None:
    """Let the gradients of the 16-bit ones among these add up in fp32 from now on.

    Args:
        choice: None stands for yes, unless it was decided before.
    """
    for parameter in parameters:
        if parameter.dtype not in LOW or not parameter.requires_grad:
            continue
        decided = getattr(parameter, "_main_grad", None)
        if decided is not None and choice in (None, decided):
            continue
        parameter._main_grad = choice is not False  # type: ignore[attr-defined]
        if choice is not False and decided is None:
            parameter.register_hook(before_adding(parameter))


def read_in_fp32(parameters: Iterable[Tensor]) -> None:
    """`accumulate_in_fp32`, and no reduction rounds what it leaves in `grad`."""
    parameters = list(parameters)
    accumulate_in_fp32(parameters)
    for parameter in parameters:
        parameter._reads_fp32 = True  # type: ignore[attr-defined]


def before_adding(parameter: Tensor) -> Callable[[Tensor], None]:
    """The hook that runs before autograd adds to `grad`."""
    owner = weakref.ref(parameter)

    def hook(_: Tensor) -> None:
        if (alive := owner()) is not None:
            unround(alive)

    return hook


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Let it be `grad`. Of 16-bit parameters it may have fp32, which torch must know.

    With `grad_dtype` None, autograd adds gradients of any dtype.
    """
    if parameter.dtype in LOW and parameter.grad_dtype != torch.float32:
        parameter.grad = None
        is_wide = gradient.dtype != parameter.dtype
        parameter.grad_dtype = None if is_wide else parameter.dtype
    parameter.grad = gradient


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """In which the gradients of a parameter add up, here and over ranks."""
    is_main = getattr(parameter, "_main_grad", False)
    return torch.float32 if is_main else parameter.dtype


@torch.no_grad()
def unround(parameter: Tensor) -> Tensor | None:
    """Have the gradient in the dtype in which it adds up, as it was before rounding.

    A gradient that has been written to since (clipped, unscaled) is taken as it is.
    """
    grad = parameter.grad
    if grad is not None and grad.dtype in LOW and gradient_dtype(parameter) not in LOW:
        total, version = getattr(grad, "_before_rounding", (grad, -1))
        written = version != grad._version
        set_gradient(parameter, of_dtype(grad, torch.float32) if written else total)
    return parameter.grad


@torch.no_grad()
def add_to_gradient(
    parameter: Tensor,
    part: Tensor,
    wrap: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> None:
    """Add what a reduction gave to `grad`; it is taken over if there was none."""
    total = unround(parameter)
    leave_gradient(parameter, part if total is None else total.add_(part), wrap)


@torch.no_grad()
def leave_gradient(
    parameter: Tensor,
    total: Tensor,
    wrap: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> None:
    """Let the sum be the `grad` of a parameter, in the dtype that optimizers take.

    Args:
        wrap: gives what stands in `grad` its class.
    """
    total = wrap(total)
    reads_fp32 = getattr(parameter, "_reads_fp32", False)
    if reads_fp32 or total.dtype in (parameter.dtype, parameter.grad_dtype):
        set_gradient(parameter, total)
        return
    set_gradient(parameter, grad := of_dtype(total, parameter.dtype))
    if total.dtype == gradient_dtype(parameter):
        grad._before_rounding = (total, grad._version)  # type: ignore[attr-defined]


def of_dtype(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that keeps its class: `GradScaler` knows shards by it."""
    copy = gradient.to(dtype)
    if type(gradient) is not Tensor:
        copy = copy.as_subclass(type(gradient))
        copy.__dict__.update(gradient.__dict__)
    return copy
