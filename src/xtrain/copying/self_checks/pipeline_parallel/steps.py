"""Shared by the schedules' steps: a stage a rank, three steps against one process."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends

ROWS, HIDDEN, CLASSES = 2, 6, 5


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all rows with a target, and how many these are."""
    return F.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


def check_steps(form: Any, rank: int, size: int, micro_batches: int) -> None:
    torch.manual_seed(0)  # the same whole model on every rank
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(size)]
    model = nn.Sequential(*blocks[1:], nn.Linear(HIDDEN, CLASSES))
    stage = copy.deepcopy(model[rank])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, stage)]
    rows = ROWS * micro_batches
    targets = torch.arange(rows) % CLASSES
    targets[1:6] = -100  # so micro-batches count unequally
    activation = torch.empty(ROWS, HIDDEN)
    for step in range(3):
        inputs = randn(rows, HIDDEN, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = loss_fn(model(inputs), targets)
        expected = total / count
        expected.backward()
        with Sent() as sent:
            loss = form(stage, loss_fn, inputs, targets, micro_batches, activation)
        same(f"the loss of step {step}", loss.to(expected.dtype), expected.detach())
        pairs = list(zip(stage.parameters(), model[rank].parameters(), strict=True))
        for name, (mine, whole) in zip(("dW", "db"), pairs, strict=True):
            same(f"{name} of this rank's stage", gradient(mine), gradient(whole))
        for optimizer in optimizers:
            optimizer.step()
    for mine, whole in pairs:
        what = f"a parameter of {mine.dim()} dims after 3 steps"
        same(what, mine.detach(), whole.detach())
    neighbours = (rank > 0) + (rank < size - 1)
    both = (size - 1) / size * 16  # the sum and the count, in float64
    sends(
        sent,
        "m outputs to the next rank, m gradients to the one before, 16 bytes to all",
        neighbours * micro_batches * activation.nbytes + both,
    )
