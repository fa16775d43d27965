"""Backward in two parts: gradients of inputs now, those of linear weights later.

    F    y = x W^T + b      B    dx = dy W; keep x, dy      W    dW = dy^T x; free them

Computes:   every gradient of a plain backward, once; norms and embeddings have it in B.
Sends:      nothing; the runner sends dx as soon as B is done, and runs W when idle.
Leaves out: products other than F.linear, casts of weights, autocast, recompute, checks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def split_backward() -> Iterator["_SplitBackward"]:
    """`with split_backward() as split:` around a forward, then its two methods."""
    split = _SplitBackward()
    with _ReplaceLinear(split.queue):
        yield split


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b whose backward computes dx, and queues what dW and db need."""

    @staticmethod
    def forward(ctx: Any, queue: Any, parameters: Any, x: Tensor, *own: Tensor) -> Any:
        ctx.save_for_backward(x, own[0])
        ctx.queue, ctx.parameters = queue, parameters
        return F.linear(x, *own)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.queue.append((ctx.parameters, x.flatten(0, -2), dy.flatten(0, -2)))
        dx = dy @ weight if ctx.needs_input_grad[2] else None
        return None, None, dx, *(None for _ in ctx.parameters)


class _SplitBackward:
    def __init__(self) -> None:
        self.queue: list[tuple[list[nn.Parameter], Tensor, Tensor]] = []

    def backward_input(self, outputs: Any, gradients: Any = None) -> None:
        torch.autograd.backward(outputs, gradients)  # fills the queue

    def backward_weight(self) -> None:
        parameters, gradients = [], []
        while self.queue:
            weight_and_bias, x, dy = self.queue.pop()
            parameters += weight_and_bias
            gradients += [dy.t() @ x, dy.sum(0)][: len(weight_and_bias)]
        torch.autograd.backward(parameters, gradients)  # adds to .grad, runs hooks


class _ReplaceLinear(TorchFunctionMode):
    """In here F.linear is _SplitLinear; a model of your own can call that instead."""

    def __init__(self, queue: list[Any]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(self, f: Any, _: Any, args: Any = (), kw: Any = None) -> Any:
        if f is F.linear and torch.is_grad_enabled() and not kw:
            x, *parameters = [arg for arg in args if arg is not None]
            if all(isinstance(p, nn.Parameter) and p.requires_grad for p in parameters):
                # Not the parameters: autograd would call their hooks with None in B.
                detached = [p.detach().requires_grad_() for p in parameters]
                return _SplitLinear.apply(self.queue, parameters, x, *detached)
        return f(*args, **(kw or {}))
