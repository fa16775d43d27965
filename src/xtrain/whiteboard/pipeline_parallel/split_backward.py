"""Backward in two parts: gradients of inputs now, those of linear weights later.

    F    y = x W^T + b      B    dx = dy W; keep x, dy      W    dW = dy^T x; free them

Computes:   every gradient of a plain backward, once; norms and embeddings have it in B.
Sends:      nothing; the runner sends dx as soon as B is done, and runs W when idle.
Leaves out: products other than F.linear, casts of weights, autocast, recompute, checks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def split_backward() -> "_Split":
    """`with split_backward() as split:` around a forward, then its two methods."""
    return _Split()


class _Split(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[list[nn.Parameter], Tensor, Tensor]] = []

    def __torch_function__(self, f: Any, _: Any, args: Any = (), kw: Any = None) -> Any:
        if f is F.linear and torch.is_grad_enabled() and not kw:
            x, *weights = [arg for arg in args if arg is not None]
            if all(isinstance(w, nn.Parameter) and w.requires_grad for w in weights):
                # Not the weights: autograd would call their hooks with None in B.
                leaves = [w.detach().requires_grad_() for w in weights]
                return _Linear.apply(self.queue, weights, x, *leaves)
        return f(*args, **(kw or {}))

    def backward_input(self, outputs: Any, gradients: Any = None) -> None:
        torch.autograd.backward(outputs, gradients)

    def backward_weight(self) -> None:
        parameters, gradients = [], []
        while self.queue:
            weights, x, dy = self.queue.pop()
            parameters += weights
            gradients += [dy.t() @ x, dy.sum(0)][: len(weights)]
        torch.autograd.backward(parameters, gradients)  # adds to .grad, runs hooks


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queue: Any, weights: Any, x: Tensor, *leaves: Tensor) -> Any:
        ctx.save_for_backward(x, leaves[0])
        ctx.queue, ctx.weights, ctx.none = queue, weights, [None] * len(leaves)
        return F.linear(x, *leaves)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.queue.append((ctx.weights, x.flatten(0, -2), dy.flatten(0, -2)))
        return None, None, dy @ weight if ctx.needs_input_grad[2] else None, *ctx.none
