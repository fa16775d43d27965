"""AdamW: Adam with weight decay that does not pass through the moments.

    m <- b1 m + (1 - b1) g          m' = m / (1 - b1^t)
    v <- b2 v + (1 - b2) g^2        v' = v / (1 - b2^t)
    p <- p - lr * decay * p - lr * m' / (sqrt(v') + eps)

Computes:   one step for every parameter that has a gradient; m, v and t stay between.
Sends:      nothing; it works element by element, so ZeRO may cut parameters anywhere.
Leaves out: amsgrad, maximize, a closure, fused kernels, checks.
"""

from typing import Any

import torch


class AdamW(torch.optim.Optimizer):
    """The base class brings parameter groups, zero_grad and state_dict."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                t, m, v = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]

                m.lerp_(parameter.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                # m and v began at zero: what they lack is divided away.
                root = (v / (1 - beta2**t)).sqrt() + group["eps"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(m, root, value=-lr / (1 - beta1**t))
