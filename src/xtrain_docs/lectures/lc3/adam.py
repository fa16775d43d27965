"""Adam's moments and steps when the gradient turns round."""

import torch
from torch import nn

from xtrain.zero import Adam

from ...figures import REGISTRY
from ...svg import Axis, line_chart


def adam_steps(gradients: list[float], lr: float = 0.01) -> list[list[float]]:
    """Adam on one weight: [m, root of v, step / lr] after each gradient."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Adam([weight], lr=lr)
    rows = []
    for gradient in gradients:
        before = weight.item()
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        state = optimizer.state[weight]
        mean, square = state["exp_avg"].item(), state["exp_avg_sq"].item()
        rows.append([mean, square**0.5, (before - weight.item()) / lr])
    return rows


@REGISTRY
def adam_moments(steps: int = 30) -> str:
    """Adam on one weight whose gradient is 1, then -1: its moments and its steps."""
    gradients = [1.0] * steps + [-1.0] * steps
    mean, root, step = zip(*adam_steps(gradients), strict=True)
    series = {"gradient": gradients, "mean m": mean, "root of v": root,
              "step / rate": step}  # fmt: skip
    words = (
        f"The first mean is {mean[0]:.2g} and the first step {step[0]:.2g} times the "
        f"learning rate; when the gradient turns round, the mean needs "
        f"{sum(m > 0 for m in mean[steps:])} steps to do so."
    )
    return line_chart(
        {name: list(enumerate(line, start=1)) for name, line in series.items()},
        Axis("steps", low=1, ticks=[1, 15, 30, 45, 60]),
        Axis("", low=-1, high=1),
        "Adam with a gradient that turns round",
        words,
    )
