"""Adam's moments and steps when the gradient turns round."""

import torch
from torch import nn

from xtrain.zero import Adam

from ...figures import REGISTRY
from ...svg import document, line, text
from .common import EDGE, WIDTH


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
    parts, left, y = [], 92, 34.0
    wide = (EDGE - left) / (2 * steps - 1)
    for colour, (name, numbers) in enumerate(series.items()):
        parts.append(text(6, y + 4, name, "xt-label"))
        for level in (1, 0, -1):
            at, kind = y - 24 * level, "xt-grid" if level else "xt-axis"
            parts.append(line(left, at, EDGE, at, kind))
            parts.append(text(left - 6, at + 4, str(level), "xt-tick", "end"))
        places = ((left + i * wide, y - 24 * v) for i, v in enumerate(numbers))
        points = " ".join(f"{x:.1f},{at:.1f}" for x, at in places)
        parts.append(f'<polyline points="{points}" class="xt-line xt-s{colour}"/>')
        y += 68
    parts.append(text(left, y - 16, "step 1", "xt-tick"))
    parts.append(text(EDGE, y - 16, f"step {2 * steps}", "xt-tick", "end"))
    title = "Adam with a gradient that turns round"
    return document(WIDTH, y - 8, parts, title, words)
