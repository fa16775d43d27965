"""Of pipelines: a stage a rank, three steps are those of one process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.copying.self_checks.harness import GROUP, Sent, gradient, randn, same, sends

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


def check_checkpoint(form: Any, rank: int, size: int) -> None:
    """With dropout, gradients are those without; messages go out twice."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.5), nn.Linear(24, 6))
    layers = nn.Sequential(part, nn.Tanh())

    def summed(x: Tensor) -> Tensor:  # over the ranks; no gradient flows through it
        total = x.detach().clone()
        dist.all_reduce(total, group=GROUP.get())
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


def check_gpipe_step(form: Any, rank: int, size: int) -> None:
    """Three steps, a stage a rank and 3 micro-batches, equal those of one process."""
    check_steps(form, rank, size, micro_batches=3)


def check_one_f_one_b_step(form: Any, rank: int, size: int) -> None:
    """Three steps, a stage a rank and 6 micro-batches, equal those of one process."""
    check_steps(form, rank, size, micro_batches=6)


def check_split_backward(form: Any, rank: int, size: int) -> None:
    """Two micro-batches as F F B B W W: the gradients of two plain backwards."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6, bias=False)]
    stage = nn.Sequential(*layers)
    inputs = [randn(5, 6, seed=2 * rank + n) for n in (0, 1)]
    dy = randn(5, 6, seed=9)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for x in leaves:
        stage(x).backward(dy)
    named = dict(stage.named_parameters())
    expected = {f"d {name}": gradient(weight) for name, weight in named.items()}
    expected |= {f"dx of micro-batch {n}": gradient(x) for n, x in enumerate(leaves)}

    stage.zero_grad()
    leaves, running = [x.clone().requires_grad_() for x in inputs], []
    with Sent() as sent:
        for x in leaves:  # F0 F1
            with form() as split:
                running.append((split, stage(x)))
        for split, y in running:  # B0 B1
            split.backward_input(y, dy)
        late = [name for name, weight in named.items() if weight.grad is None]
        assert late == ["0.weight", "0.bias", "3.weight"], "they wait for W"
        found = {f"dx of micro-batch {n}": gradient(x) for n, x in enumerate(leaves)}
        for split, _ in running:  # W0 W1
            split.backward_weight()
    found |= {f"d {name}": gradient(weight) for name, weight in named.items()}
    for what, whole in expected.items():
        same(what, found[what], whole)
    sends(sent, "nothing", 0)
