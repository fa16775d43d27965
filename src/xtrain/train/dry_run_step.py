"""A training step by its shapes: what a rank of a dry run does.

    mesh, model, optimizer of the recipe, on meta
    train_step     virtual time passes, memory is counted by what it is for

The step is that of a training run; `Shapes` does what meta cannot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.cluster import now, running
from xtrain.cluster.compute import Device
from xtrain.train.batches import Batch, share
from xtrain.train.dry_run_shapes import Shapes
from xtrain.train.layouts import make_mesh, wrapped_model
from xtrain.train.optimizers import make_optimizer
from xtrain.train.phases import Place
from xtrain.train.recipe import Recipe
from xtrain.train.run import DTYPES
from xtrain.train.steps import train_step

WEIGHTS, GRADIENTS, ACTIVATIONS = "weights", "gradients", "activations"
STATE, UPDATE = "optimizer state", "update"
KINDS = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, UPDATE)


class StepOfRank(NamedTuple):
    """What a rank did in the step that counts."""

    begin: float
    """Its clock, in seconds; all ranks begin together."""
    optimizer: float
    """When its optimizer began."""
    end: float
    computed: float
    """Seconds that its operators took."""
    flops: int
    memory: dict[str, int]
    """Bytes when it held most, by what they are for."""


def step_of_rank(recipe: Recipe) -> StepOfRank:
    """Every rank calls it; of wrappers that learn from a first step the second one."""
    step = DryStep(recipe)
    steps = 1 + (step.model.kind in ("ddp", "fsdp", "hsdp"))
    for _ in range(steps):
        found = step.measured()
    return found


class DryStep:
    """A rank's model, optimizer and batch on meta, and a step of them."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.memory: Device = running.cluster()._device()
        self.memory.phase = WEIGHTS
        self.model = wrapped_model(
            recipe.config, recipe.layout, make_mesh(recipe.layout, "cpu"),
            sequence=recipe.data.sequence, shapes_alone=True,
            dtype=DTYPES.get(recipe.dtype, torch.float32),
        )  # fmt: skip
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.has_gradient)
        if not self.model.is_whole:  # rank 0 of data ranks asks the others, which may
            self.model.runner().data_group = None  # not run, whether all is right
        self.memory.phase = ACTIVATIONS
        group = self.model.data_group
        place = (0, 1) if group is None else (group.rank(), group.size())
        begin, end = share(recipe.batch, *place)
        shape = end - begin, recipe.data.sequence
        tokens = torch.zeros(shape, dtype=torch.long, device="meta")
        self.batch = Batch(tokens, tokens, None, begin)

    def has_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.memory.name(parameter.grad, GRADIENTS)

    def step(self) -> "Halves":
        """One, as `TrainingRun` does it; what was held before its optimizer began."""
        self.memory.phase, halves = ACTIVATIONS, Halves(self.memory)
        train_step(
            self.model, self.optimizer, self.batch, self.recipe,
            computing=self.computing, place=halves,
        )  # fmt: skip
        return halves

    @contextmanager
    def computing(self) -> Iterator[None]:
        lower = self.recipe.dtype == "bfloat16"
        with Shapes(), torch.autocast("cpu", torch.bfloat16, enabled=lower):
            yield

    def measured(self) -> StepOfRank:
        """One step, from where all ranks begin to its end.

        Its optimizer's state is made in its first step. Later ones have it from their
        beginning, so it is added to what the first one held before.
        """
        memory = self.memory
        dist.barrier()
        memory.forget_peak()
        start, computed, flops = now(), memory.seconds, memory.flops
        halves = self.step()
        before, inside = halves.before, dict(memory.at_peak)
        before[STATE] = before.get(STATE, 0) + memory.rename(UPDATE, STATE)
        most = max(before, inside, key=lambda held: sum(held.values()))
        return StepOfRank(
            start, halves.optimizer, now(), memory.seconds - computed,
            memory.flops - flops, {kind: most.get(kind, 0) for kind in KINDS},
        )  # fmt: skip


class Halves(Place):
    """Where a step's optimizer begins: what was held until then is told apart."""

    def __init__(self, memory: Device):
        super().__init__()
        self.memory, self.before, self.optimizer = memory, dict[str, int](), 0.0

    def enter(self, phase: str, step: int | None = None) -> None:
        super().enter(phase, step)
        if phase == "optimizer":
            memory, self.optimizer = self.memory, now()
            memory.rename(ACTIVATIONS, GRADIENTS)
            self.before = dict(memory.at_peak)
            memory.forget_peak()
            memory.phase = UPDATE
