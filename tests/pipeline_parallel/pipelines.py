"""A small model cut into stages, and the same in one process, for every test here."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import SCHEDULES, Action, Schedule

WIDTH = 6
LIKE = torch.float64


class Layer(nn.Module):
    """A residual layer with a norm, so that not everything is a matrix."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def whole_model(layers: int, width: int = WIDTH, seed: int = 3) -> nn.Sequential:
    """The same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(Layer(width) for _ in range(layers))).to(LIKE)


def batch(rows: int, width: int = WIDTH, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, width, dtype=LIKE, generator=generator)
    targets = torch.randn(rows, width, dtype=LIKE, generator=generator)
    targets[::3] = 0.0  # rows that do not count
    return inputs, targets


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum and a count that differ from micro-batch to micro-batch."""
    valid = (target != 0).any(-1)
    return (output - target)[valid].square().sum(), valid.sum()


def own_stages(
    model: nn.Sequential, schedule: Schedule, rank: int | None = None
) -> list[PipelineStage]:
    """A rank's stages, this one's unless told, of one layer each or more."""
    count = schedule.stages
    cuts = [len(model) * s // count for s in range(count + 1)]
    return [
        PipelineStage(nn.Sequential(*model[cuts[s] : cuts[s + 1]]), s, count)
        for s in schedule.stages_of(dist.get_rank() if rank is None else rank)
    ]


def dense_gradients(
    model: nn.Module, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of the whole batch, and every gradient, in one process."""
    model.zero_grad()
    total, count = squares(model(inputs), targets)
    loss = total / count.clamp(min=1)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def dense_names(model: nn.Sequential, stage: PipelineStage) -> dict[str, nn.Parameter]:
    """A stage's parameters by their names in the whole model."""
    count = stage.count
    first = len(model) * stage.index // count
    found = {}
    for name, parameter in stage.module.named_parameters():
        layer, rest = name.split(".", 1)
        found[f"{first + int(layer)}.{rest}"] = parameter
    return found


def computations(executed: list[Action]) -> list[Action]:
    return [a for a in executed if a.kind in ("F", "B", "W", "BW")]


def make(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name](ranks, micro_batches)


def run_step(name: str, ranks: int, micro_batches: int, rows: int) -> dict:
    """One step on this rank, and what it differs from one process by."""
    schedule = make(name, ranks, micro_batches)
    inputs, targets = batch(rows)
    reference = whole_model(schedule.stages + 1)
    wanted, gradients = dense_gradients(reference, inputs, targets)
    model = whole_model(schedule.stages + 1)
    stages = own_stages(model, schedule)
    runner = PipelineRunner(stages, schedule, squares)
    losses = [runner.step(inputs, targets)]
    for parameter in runner.parameters:
        parameter.grad = None
    losses.append(runner.step(inputs, targets))  # nothing is negotiated any more
    worst = max(
        (parameter.grad - gradients[n]).abs().max().item()
        for stage in stages
        for n, parameter in dense_names(model, stage).items()
    )
    return {
        "losses": [(loss - wanted).abs().item() for loss in losses],
        "gradients": worst,
        "order": computations(runner.executed) == list(schedule.actions[runner.rank]),
        "peak": runner.peak_activations,
        "evaluated": (runner.evaluate(inputs, targets) - wanted).abs().item(),
    }


# ------------------------------------------------------ any modules, one to a stage


def chain(modules: list[nn.Module], inputs: tuple[Tensor, ...]) -> object:
    """What the modules make of the inputs, one after the other, in one process."""
    out: object = inputs
    for module in modules:
        out = module(*out) if isinstance(out, tuple | list) else module(out)
    return out


def dense_loss(
    modules: list[nn.Module], micro_batches: list, targets: list, loss_fn=squares
) -> Tensor:
    """The mean loss over micro-batches, with its gradients, in one process."""
    totals, counts = [], []
    for rows, target in zip(micro_batches, targets, strict=True):
        out = chain(modules, rows if isinstance(rows, tuple) else (rows,))
        total, count = loss_fn(out, target)
        totals.append(total)
        counts.append(count)
    loss = sum(totals) / max(float(sum(counts)), 1.0)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def own(modules: list[nn.Module], schedule: Schedule, rank: int) -> list[PipelineStage]:
    """This rank's stages of one module each."""
    count = schedule.stages
    return [PipelineStage(modules[s], s, count) for s in schedule.stages_of(rank)]


def worst_gradient(ours: nn.Module, reference: nn.Module) -> float:
    """How far the gradients are apart; infinity where only one has any number in it."""
    worst = 0.0
    for mine, other in zip(ours.parameters(), reference.parameters(), strict=True):
        if mine.grad is None or other.grad is None:
            there = mine.grad if other.grad is None else other.grad
            apart = float("inf") if there is not None and there.any() else 0.0
        else:
            apart = (mine.grad - other.grad).abs().max().item() if mine.numel() else 0.0
        worst = max(worst, apart)
    return worst
