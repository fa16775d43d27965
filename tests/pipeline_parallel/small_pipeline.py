"""Functions that run on every rank for the errata and the questions of lc5.

A small pipeline that does the lists of any schedule whose backwards are whole: one
layer a stage, one tensor a message, sends that are not waited for before the end.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pipeline_parallel.waiting_sends import is_send, message_of, posts
from xtrain.comm.checks import rank_and_size
from xtrain.schedules import SCHEDULES, Schedule, with_messages
from xtrain.schedules.action import Action

ROWS, WIDTH = 3, 4
LEARNING_RATE = 0.1
Weights = dict[int, Tensor]
Layer = Callable[[int], nn.Module]


def drawn(seed: int, *shape: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device())


def layer(stage: int) -> nn.Module:
    """The whole of a stage: one matrix and a tanh."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(drawn(stage, WIDTH, WIDTH))
    return nn.Sequential(linear, nn.Tanh())


def batch(step: int, micro_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of a step, in micro-batches."""
    both = drawn(100 + step, 2, micro_batches, ROWS, WIDTH)
    return list(both[0]), list(both[1])


def loss_sum(y: Tensor, target: Tensor) -> Tensor:
    """Over the rows of a micro-batch; the mean is taken once, over the batch."""
    return ((y - target) ** 2).sum()


class SmallPipeline:
    """A rank's stages, and what travels between them."""

    def __init__(self, name: str, micro_batches: int, layer: Layer = layer):
        rank, size = rank_and_size(None)
        self.schedule = SCHEDULES[name](size, micro_batches)
        self.actions = with_messages(self.schedule).actions[rank]
        self.stages = {s: layer(s) for s in self.schedule.stages_of(rank)}
        self.waiting: dict[tuple[str, int, int], Tensor] = {}  # for F or B of a stage
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def step(
        self,
        inputs: list[Tensor],
        targets: list[Tensor],
        divisors: list[float] | None = None,
    ) -> None:
        """All actions; leaves gradients.

        Args:
            divisors: of the loss of each micro-batch; all rows of the batch by default.
        """
        self.inputs, self.targets = inputs, targets
        rows = float(sum(map(len, inputs)))
        self.divisors = divisors or [rows] * len(inputs)
        for action in self.actions:
            for kind, stage, i, _ in action.parts:
                if kind == "F":
                    self.forward(stage, i)
                elif kind == "BW":
                    self.backward(stage, i)
                else:
                    self.message(Action(kind, stage, i))
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def forward(self, stage: int, i: int) -> None:
        x = self.waiting.pop(("F", stage, i)) if stage else self.inputs[i].clone()
        y = self.stages[stage](x.requires_grad_())
        if stage == self.schedule.stages - 1:
            y = loss_sum(y, self.targets[i]) / self.divisors[i]
        self.graphs[stage, i] = x, y
        self.waiting["F", stage + 1, i] = y.detach()

    def backward(self, stage: int, i: int) -> None:
        x, y = self.graphs.pop((stage, i))
        gradient = self.waiting.pop(("B", stage, i), None)  # none for the loss
        torch.autograd.backward(y, gradient)
        assert x.grad is not None
        self.waiting["B", stage - 1, i] = x.grad

    def message(self, action: Action) -> None:
        direction, source, i = message_of(action)
        target = source + (1 if direction == "F" else -1)
        key = direction, target, i
        if is_send(action):
            tensor = self.waiting.pop(key)
            work = dist.isend(tensor, self.schedule.rank_of(target, i))
            self.sent.append((work, tensor))
        else:
            self.waiting[key] = drawn(0, len(self.inputs[i]), WIDTH)
            dist.recv(self.waiting[key], self.schedule.rank_of(source, i))

    def update(self) -> None:
        """One step of the optimizer."""
        with torch.no_grad():
            for weight in self.weights.values():
                weight -= LEARNING_RATE * weight.grad
                weight.grad = None

    @property
    def weights(self) -> Weights:
        """The matrix of each stage."""
        return {s: next(module.parameters()) for s, module in self.stages.items()}


def gradients(name: str, micro_batches: int) -> Weights:
    """Of the stages of this rank, after one step."""
    pipeline = SmallPipeline(name, micro_batches)
    pipeline.step(*batch(0, micro_batches))
    return {s: weight.grad for s, weight in pipeline.weights.items()}


def messages_only(
    name: str, micro_batches: int, fused: bool, seconds: float, by_parity: bool = False
) -> str:
    """Send and receive what the schedule does, waiting for each; nothing is computed.

    Returns:
        The messages at which this rank still stood after `seconds`; else "".
    """
    rank, size = rank_and_size(None)
    schedule = SCHEDULES[name](size, micro_batches)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    post: list[Action] = []
    try:
        parity = rank % 2 if by_parity else None
        for post in posts(with_messages(schedule).actions[rank], fused, parity):
            works = [started(schedule, message, group) for message in post]
            for work in works:
                work.wait()
    except RuntimeError:
        return ", ".join(map(str, post))
    finally:
        dist.destroy_process_group(group)
    return ""


def started(schedule: Schedule, message: Action, group: dist.ProcessGroup) -> Any:
    """An empty word to or from the neighbour."""
    direction, source, i = message_of(message)
    target = source + (1 if direction == "F" else -1)
    if is_send(message):
        to = schedule.rank_of(target, i)
        return dist.isend(torch.zeros(1), to, group=group)
    return dist.irecv(torch.zeros(1), schedule.rank_of(source, i), group=group)
