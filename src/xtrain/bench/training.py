"""A training step as a trial: forward, backward, optimizer, on each rank's batch.

    contestant = how a model is wrapped and with what it is stepped
    trial      = the same model, the same batches, CHECKED steps; the losses must agree

The loss of a rank in step k depends on the weights that k - 1 updates left on all
ranks, so losses that agree say that gradients were averaged and weights updated alike.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain import backends
from xtrain.bench.llama import VOCABULARY, Llama, Shape, width_for
from xtrain.bench.race import Case, Trial
from xtrain.plan import Traffic

CHECKED = 4  # steps whose losses are compared
TOLERANCE = 1e-4  # of a loss near 6: sums in another order, four updates long
OPTIONS: dict[str, Any] = {"lr": 1e-3, "fused": True}  # of torch's AdamW, on every side

# Takes a model and a group; returns what to call, and an optimizer or what looks so.
Wrap = Callable[[nn.Module, ProcessGroup], tuple[Callable[..., Tensor], Any]]


def group_on(backend: str) -> ProcessGroup:
    """A group of all ranks on `backend`; the default group stands in for gloo."""
    world = dist.group.WORLD
    assert world is not None
    if backend == "gloo":
        return world
    backends.register()
    return dist.new_group(backend=backend)


def training_trial(shape: Shape, wrap: Wrap, backend: str, case: Case) -> Trial:
    """One step of the model whose weights take about `case.size` bytes."""
    torch.manual_seed(0)
    model = Llama(width_for(case.size, shape.layers), shape, case.device)
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = torch.randint(
        VOCABULARY, (2, shape.batch, shape.sequence), device=case.device
    )
    wrapped, optimizer = wrap(model, group_on(backend))
    losses = torch.zeros(CHECKED, device=case.device)
    steps = iter(range(CHECKED))

    def step() -> None:
        optimizer.zero_grad()
        loss = wrapped(tokens, targets)
        loss.backward()
        optimizer.step()
        place = next(steps, None)
        if place is not None:
            losses[place] = loss.detach()

    return Trial(step, [losses])


def model_for(case: Case, shape: Shape) -> Llama:
    """The model of a case without memory behind it, to count its parameters."""
    with torch.device("meta"):
        return Llama(width_for(case.size, shape.layers), shape, "meta")


def sum_of(parts: Iterable[Traffic]) -> Traffic:
    """Several collectives, one after the other."""
    return reduce(Traffic.then, parts)


def adamw(model: nn.Module) -> Optimizer:
    """torch's fused AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), **OPTIONS)
