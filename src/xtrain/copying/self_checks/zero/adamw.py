"""A hundred steps equal torch's."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    start = randn(50, seed=0)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        form([mine], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([other], lr=0.02, weight_decay=0.1),
    ]
    with Sent() as sent:
        for step in range(100):
            mine.grad = other.grad = randn(50, seed=step)
            for optimizer in optimizers:
                optimizer.step()
    same("the weights after 100 steps are torch's", mine.detach(), other.detach())
    sends(sent, "nothing", 0)
