"""A hundred steps equal torch's."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.zero.adamw import AdamW


def check(rank: int, size: int) -> None:
    start = randn(50, seed=0, dtype=torch.float64)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        AdamW([mine], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([other], lr=0.02, weight_decay=0.1),
    ]
    with Sent() as sent:
        for step in range(100):
            mine.grad = other.grad = randn(50, seed=step, dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.step()
    same(
        "the weights after 100 steps are torch's", mine.detach(), other.detach(), 1e-12
    )
    sends(sent, "nothing", 0)
