"""Small steps add up in the masters, and an overflow on one rank stops all of them."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, same, sends


def check(form: Any, rank: int, size: int) -> None:
    weight = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = form([weight], torch.optim.SGD, lr=0.001)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    master = optimizer.masters[0]
    same(
        "1 less 100 steps of 0.001, in the master",
        master,
        torch.full((4,), 0.9, dtype=torch.float32),
    )
    same("the bf16 weight is the master's cast", weight.detach(), master.bfloat16(), 0)

    weight = nn.Parameter(torch.ones(4).half())
    optimizer = form([weight], torch.optim.SGD, 1024.0, lr=0.1)
    weight.grad = torch.full_like(weight, float("inf") if rank == size - 1 else 1.0)
    with Sent() as sent:
        assert optimizer.step() is False
    same(
        "the weight after the last rank's overflow",
        weight.detach(),
        torch.ones(4).half(),
        0,
    )
    same("the scale, halved", torch.tensor(optimizer.scale), torch.tensor(512.0), 0)
    nbytes = torch.get_default_dtype().itemsize
    sends(sent, "one number a step", 2 * (size - 1) / size * nbytes)
