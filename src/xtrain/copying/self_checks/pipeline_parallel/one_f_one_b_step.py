"""Three steps of 4 stages, 6 micro-batches on 4 ranks, equal those of one process."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.pipeline_parallel.one_f_one_b_step import one_f_one_b_step

ROWS, HIDDEN, CLASSES, MICRO_BATCHES = 2, 6, 5, 6


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all rows with a target, and how many these are."""
    return F.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole model on every rank
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks[:3], nn.Linear(HIDDEN, CLASSES)).double()
    stage = copy.deepcopy(model[rank])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, stage)]
    rows = ROWS * MICRO_BATCHES
    targets = torch.arange(rows) % CLASSES
    targets[1:6] = -100  # so micro-batches count unequally
    activation = torch.empty(ROWS, HIDDEN, dtype=torch.float64)
    for step in range(3):
        inputs = randn(rows, HIDDEN, seed=step, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        total, count = loss_fn(model(inputs), targets)
        expected = total / count
        expected.backward()
        with Sent() as sent:
            loss = one_f_one_b_step(
                stage, loss_fn, inputs, targets, MICRO_BATCHES, activation
            )
        same(f"the loss of step {step}", loss, expected.detach(), 1e-12)
        pairs = list(zip(stage.parameters(), model[rank].parameters(), strict=True))
        for name, (mine, whole) in zip(("dW", "db"), pairs, strict=True):
            what = f"{name} of this rank's stage"
            same(what, gradient(mine), gradient(whole), 1e-12)
        for optimizer in optimizers:
            optimizer.step()
    for mine, whole in pairs:
        what = f"a parameter of {mine.dim()} dims after 3 steps"
        same(what, mine.detach(), whole.detach(), 1e-12)
    neighbours = (rank > 0) + (rank < size - 1)
    formula = f"{MICRO_BATCHES} of {activation.nbytes} bytes a neighbour, 3/4 of 16"
    sends(sent, formula, neighbours * MICRO_BATCHES * activation.nbytes + 12)
