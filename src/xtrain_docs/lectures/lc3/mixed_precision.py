"""Small steps of a bfloat16 weight."""

import torch
from torch import nn

from xtrain.zero import MixedPrecisionOptimizer

from ...figures import REGISTRY
from ...svg import Axis, line_chart


@REGISTRY
def bf16_steps(steps: int = 30, lr: float = 0.001) -> str:
    """A bfloat16 weight that takes small steps, alone and with an fp32 master."""
    alone, mixed = (nn.Parameter(torch.ones(1).bfloat16()) for _ in range(2))
    plain = torch.optim.SGD([alone], lr=lr)
    masters = MixedPrecisionOptimizer([mixed], torch.optim.SGD, lr=lr)
    ((_, master),) = masters.pairs
    named = {"bf16 alone": alone, "bf16 with a master": mixed,
             "its fp32 master": master}  # fmt: skip
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    for step in range(1, steps + 1):
        for weight, optimizer in ((alone, plain), (mixed, masters)):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        for name, weight in named.items():
            lines[name].append((step, weight.item()))
    return line_chart(
        lines,
        Axis("steps", format="{:g}".format),
        Axis("weight", format="{:.2f}".format, low=1 - 1.1 * steps * lr, high=1.0),
        "Small steps of a bf16 weight",
        f"Alone it stays at {alone.item():g}; with a master it comes to "
        f"{mixed.item():.4g}.",
    )
