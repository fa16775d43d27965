"""Layers that sleep instead of computing, to time a runner against its schedule.

    forward                     sleeps F, returns x * weight
    gradient of the input       sleeps B
    gradient of the weight      sleeps W, where the schedule has one

Sleeping needs no core, so 8 ranks run on 2 cores as on 8, and a step takes the
simulated time plus the overhead of runner and messages.

torch splits a backward along the graph of autograd, and calls a node that belongs to
both parts twice. So the two sleeps are nodes of their own, and what joins them, a
product, takes no time.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.comm.deferred import deferral

Sleep = Callable[[float], object]


class SleepingLayer(nn.Module):
    """x * weight, after a pause.

    Args:
        seconds: of F, of B and of W.
        sleep: what to do instead of `time.sleep`.
    """

    def __init__(self, width: int, seconds: float, sleep: Sleep = time.sleep):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, width))
        self.seconds, self.sleep = seconds, sleep

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        pause = partial(self.sleep, self.seconds)
        pause()
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the first layer sleeps B, too
        x = _PauseInBackward.apply(x, pause)
        later, (weight,) = deferral(self.weight)
        if later is None:
            return x * _PauseInBackward.apply(weight, pause)
        return _Scale.apply(later, pause, x, weight)


class _PauseInBackward(torch.autograd.Function):
    """x, whose gradient pauses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Callable[[], object]) -> Tensor:
        ctx.pause = pause
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pause()
        return grad, None


class _Scale(torch.autograd.Function):
    """x * weight, whose weight's gradient waits for its turn."""

    @staticmethod
    def forward(
        ctx: Any, later: Any, pause: Callable[[], object], x: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.later, ctx.pause = later, pause
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.later.add(partial(_weight_gradient, ctx.pause), x, grad)
        return None, None, grad * weight, None


def _weight_gradient(
    pause: Callable[[], object], x: Tensor, grad: Tensor
) -> tuple[Tensor]:
    pause()
    return ((x * grad).flatten(0, -2).sum(0),)
