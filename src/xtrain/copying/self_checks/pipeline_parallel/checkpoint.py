"""Gradients with dropout equal those without a checkpoint; messages go out twice."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Here, Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.5), nn.Linear(24, 6))
    layers = nn.Sequential(part, nn.Tanh())

    def summed(x: Tensor) -> Tensor:  # over the ranks; no gradient flows through it
        total = x.detach().clone()
        dist.all_reduce(total, group=Here.group)
        return total * x

    found = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        layers.zero_grad()
        leaf = randn(3, 6, seed=rank).requires_grad_()
        y = form(layers, leaf) if recomputed else layers(leaf)
        y = form(layers, y) if recomputed else layers(y)
        after = torch.rand(4)
        y.square().sum().backward()
        weights = [gradient(weight) for weight in layers.parameters()]
        found.append([y.detach(), gradient(leaf), *weights, after, torch.rand(4)])
    words = ["the output", "dX of a leaf", *(f"gradient {n}" for n in range(4))]
    words += ["random numbers after forward", "random numbers after backward"]
    for what, plain, mine in zip(words, *found, strict=True):
        same(what, mine, plain, 0.0)

    x = randn(1000, seed=rank).requires_grad_()
    with Sent() as sent:
        form(summed, x).sum().backward()
    sends(
        sent,
        "what the function sends, backward sends once more",
        2 * 2 * (size - 1) / size * x.nbytes,
    )
