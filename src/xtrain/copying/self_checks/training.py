"""Shared by data parallelism and ZeRO: five steps, alone and on every rank's batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Sent, randn


def model_of(seed: int, *sizes: int) -> nn.Sequential:
    """Linear layers with a tanh between each two."""
    torch.manual_seed(seed)
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def five_steps(
    alone: nn.Module,
    model: Callable[[Tensor], Tensor],
    optimizers: list[Any],
    rank: int,
    size: int,
    reduce: Callable[[], Any] = lambda: None,
) -> tuple[Sent, Sent]:
    """Train one process on all batches, and this rank on its own.

    What this rank sent in the last backward, and in the last optimizer step.
    """
    one, ours = optimizers
    for step in range(5):
        batches = [randn(3, 8, seed=10 * step + r) for r in range(size)]
        one.zero_grad()
        for batch in batches:
            (alone(batch).square().sum() / size).backward()
        one.step()
        ours.zero_grad()
        with Sent() as back:
            model(batches[rank]).square().sum().backward()
            reduce()
        with Sent() as stepped:
            ours.step()
    return back, stepped


def flat(model: nn.Module) -> Tensor:
    """All weights of a model as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()
