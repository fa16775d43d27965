"""Activation recompute: keep a function's inputs, and run it once more in backward.

    forward    x -> [ function, no graph ] -> y          kept: x, the random state
    backward   x -> [ function, with its graph ] -> y    then dx <- [ graph ] <- dy

Computes:   function(*args), its gradients and those of the parameters that it uses.
Sends:      nothing of its own; what the function sends, backward sends once more.
Leaves out: keywords, tensors in lists, autocast, other devices' random states, checks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """A tensor or a tuple of them, as the function gives; memory of the inputs only."""
    # Without an input that needs a gradient, backward would never come here.
    anchor = torch.empty(0, requires_grad=True)
    return _Recomputed.apply(function, anchor, *args)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], anchor: Tensor, *args: Any
    ) -> Any:
        ctx.function, ctx.random_state = function, torch.get_rng_state()
        ctx.places = [i for i, arg in enumerate(args) if torch.is_tensor(arg)]
        ctx.args = [None if torch.is_tensor(arg) else arg for arg in args]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return function(*args)  # autograd records nothing in here

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        args = list(ctx.args)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            # Detached: the backward below must not go on into the graph outside.
            args[i] = x.detach().requires_grad_(x.requires_grad)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)  # the same dropout masks
            output = ctx.function(*args)
        outputs = (output,) if torch.is_tensor(output) else output
        pairs = zip(outputs, gradients, strict=True)
        tensors = [(y, dy) for y, dy in pairs if y.requires_grad]
        torch.autograd.backward([y for y, _ in tensors], [dy for _, dy in tensors])
        return None, None, *(x.grad if torch.is_tensor(x) else None for x in args)
