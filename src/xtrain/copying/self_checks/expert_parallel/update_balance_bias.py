"""A bias on a router that prefers two experts makes the loads even."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    bias = torch.zeros(4)
    with Sent() as sent:
        form(bias, torch.tensor([7, 1, 4, 4]), rate=0.5)
    same("down, up, and as it was", bias, torch.tensor([-0.5, 0.5, 0.0, 0.0]))

    scores = randn(1024, 8, seed=rank).add(torch.tensor([2, 1, 0, 0, 0, 0, 0, 0.0]))
    bias = torch.zeros(8)
    for step in range(400):
        counts = torch.bincount((scores + bias).topk(2)[1].flatten(), minlength=8)
        form(bias, counts, rate=0.1 if step < 100 else 0.01)
    largest = counts.max() / 256
    same(
        "400 steps later, the largest load / the mean", largest, torch.tensor(1.0), 0.1
    )
    sends(sent, "nothing", 0)
