"""Adam and AdamW, written out.

    m <- b1 m + (1 - b1) g          running mean of the gradient
    v <- b2 v + (1 - b2) g^2        running mean of its square
    p <- p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

m and v start at zero, so early means are too small; dividing by 1 - b^t corrects that.
Both are kept from step to step: an m in a local variable is a new zero every time.

Adam adds weight decay to the gradient, so it passes through m and v; AdamW shrinks the
weights directly. Everything is element by element, which is why ZeRO may cut parameters
into pieces anywhere.

Kingma and Ba, Adam, 2015; Loshchilov and Hutter, Decoupled Weight Decay, 2019.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Adam(Optimizer):
    """torch.optim.Adam: weight decay added to the gradient.

    Args:
        params: parameters or groups of them with their own options.
        amsgrad: divide by the largest v so far.
        maximize: step along the gradient instead of against it.
    """

    decoupled_weight_decay = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
    ):
        numbers = (lr, eps, weight_decay)
        ranges = [0 <= number < math.inf for number in numbers]
        if not all(ranges) or not all(0 <= b < 1 for b in betas):
            raise ValueError(
                f"lr={lr}, eps={eps} and weight_decay={weight_decay} must not be "
                f"negative and must be finite, betas={betas} must lie in [0, 1)"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        t, (beta1, beta2) = state["step"].item(), group["betas"]
        lr, decay = group["lr"], group["weight_decay"]

        grad: Tensor = parameter.grad  # type: ignore[assignment]
        grad = -grad if group["maximize"] else grad
        if decay and self.decoupled_weight_decay:
            parameter.mul_(1 - lr * decay)
        elif decay:
            grad = grad + decay * parameter

        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["amsgrad"]:
            square = torch.maximum(
                state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"]
            )
        scale = square.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-lr / (1 - beta1**t))


class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the weights, whatever the gradient."""

    decoupled_weight_decay = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize)
