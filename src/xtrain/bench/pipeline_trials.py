"""A step of a pipeline as a trial: our runner's and torch's, on the same stages.

    Model          something that can be cut, its batch and its loss
    our_step       PipelineRunner on one of our schedules
    torch_step     torch.distributed.pipelining, whose stages are placed likewise

Each trial leaves the losses of its first steps and all gradients of the first one. They
must be those of one process, which trains the whole model (`in_one_process`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer

from xtrain.bench.race import Case, Trial
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import Schedule

Step = Callable[[Tensor, Tensor], Tensor | None]
"""Forward and backward of a batch; the mean loss on ranks that know it."""
SumLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """A model that can be cut, and what it is trained on.

    Attributes:
        whole: makes all of it.
        cut: makes this rank's stages; their parameters have the names of `whole`.
        inputs, targets: the batch.
        sum_loss: of a micro-batch; the mean is over the elements of the targets.
        optimizer: of these parameters; None to train nothing.
        steps: so many are compared.
    """

    whole: Callable[[], nn.Module]
    cut: Callable[[Schedule], list[PipelineStage]]
    inputs: Tensor
    targets: Tensor
    sum_loss: SumLoss
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    steps: int


MakeModel = Callable[[Case], Model]
MakeSchedule = Callable[[int], Schedule]
MakeStep = Callable[[Schedule, list[PipelineStage], SumLoss], Step]


def our_step(
    schedule: Schedule, stages: list[PipelineStage], sum_loss: SumLoss
) -> Step:
    """Our runner on our schedule."""

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return sum_loss(output, target), target.numel()

    return PipelineRunner(stages, schedule, loss_fn).step


def torch_step(
    kind: type, schedule: Schedule, stages: list[PipelineStage], sum_loss: SumLoss
) -> Step:
    """A schedule of torch's, whose stages are on the same ranks as those of ours."""
    group = dist.group.WORLD
    device = next(stages[0].parameters()).device
    made = [TorchStage(s.module, s.index, s.count, device, group=group) for s in stages]

    def mean_loss(output: Tensor, target: Tensor) -> Tensor:
        return sum_loss(output, target) / target.numel()

    one = issubclass(kind, PipelineScheduleSingle)
    runs = kind(made[0] if one else made, schedule.micro_batches, loss_fn=mean_loss)
    first = any(stage.index == 0 for stage in stages)
    last = any(stage.index == stage.count - 1 for stage in stages)

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        runs.step(*(inputs,) if first else (), **options)
        return torch.stack(losses).mean() if last else None

    return step


def pipeline_trial(
    make_model: MakeModel, make_schedule: MakeSchedule, make_step: MakeStep, case: Case
) -> Trial:
    """A training step, with the update if the model has an optimizer."""
    model, schedule = make_model(case), make_schedule(case.ranks)
    stages = model.cut(schedule)
    step = make_step(schedule, stages, model.sum_loss)
    parameters = list(dict.fromkeys(p for s in stages for p in s.parameters()))
    optimizer = None if model.optimizer is None else model.optimizer(parameters)
    kept, place = Kept(model, schedule), 0

    def call() -> None:
        nonlocal place
        for parameter in parameters:
            parameter.grad = None
        loss = step(model.inputs, model.targets)
        if place < model.steps:
            kept.add(place, loss, stages)
        if optimizer is not None:
            optimizer.step()
        place += 1

    return Trial(call, kept.outputs)


class Kept:
    """The losses of the first steps and the gradients of the first, on every rank."""

    def __init__(self, model: Model, schedule: Schedule):
        self.schedule, self.steps = schedule, model.steps
        with torch.device("meta"):
            whole = dict(model.whole().named_parameters())
        device = model.inputs.device
        self.losses = torch.zeros(model.steps, device=device)
        self.flat = torch.zeros(sum(p.numel() for p in whole.values()), device=device)
        sizes = [p.numel() for p in whole.values()]
        self.parts = dict(zip(whole, self.flat.split(sizes), strict=True))
        self.outputs = [self.losses, self.flat]

    def add(self, place: int, loss: Tensor | None, stages: list[PipelineStage]) -> None:
        """Keep what this rank has; after the last step, sum over all ranks."""
        rank, last = dist.get_rank(), self.schedule.stages - 1
        if self.schedule.rank_of(last, 0) == rank and loss is not None:
            self.losses[place] = loss.detach()
        for stage in stages if place == 0 else ():
            if self.schedule.rank_of(stage.index, 0) == rank:  # not a second copy
                self.keep_gradients(stage.module)
        if place == self.steps - 1:
            for output in self.outputs:
                dist.all_reduce(output)

    def keep_gradients(self, module: nn.Module) -> None:
        """Copy them to their places."""
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            self.parts[name].copy_(parameter.grad.flatten())


def in_one_process(make_model: MakeModel, case: Case) -> list[Tensor]:
    """What every trial must leave: the whole model, trained by one process."""
    model = make_model(case)
    whole = model.whole()
    parameters = list(whole.parameters())
    optimizer = None if model.optimizer is None else model.optimizer(parameters)
    losses, gradients = [], torch.empty(0)
    for step in range(model.steps):
        whole.zero_grad()
        loss = model.sum_loss(whole(model.inputs), model.targets)
        (loss / model.targets.numel()).backward()
        losses.append(loss.detach() / model.targets.numel())
        if step == 0:
            flat = [p.grad.flatten() for p in parameters if p.grad is not None]
            gradients = torch.cat(flat)
        if optimizer is not None:
            optimizer.step()
    return [torch.stack(losses), gradients]
