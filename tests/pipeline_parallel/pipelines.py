"""A small model cut into stages, and the same in one process, for every test here."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.devices import randn
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.micro_batch import micro_batches
from xtrain.schedules import SCHEDULES, Schedule, with_messages, with_reductions

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


def layers(count: int, width: int = WIDTH, seed: int = 3) -> list[nn.Module]:
    """The same weights on every rank, a module for each stage."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [Layer(width).to(LIKE) for _ in range(count)]


def batch(rows: int, width: int = WIDTH, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = randn(rows, width, generator=generator)
    targets = randn(rows, width, generator=generator)
    targets[::3] = 0.0  # rows that do not count
    return inputs, targets


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum and a count that differ from micro-batch to micro-batch."""
    valid = (target != 0).any(-1)
    return (output - target)[valid].square().sum(), valid.sum()


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


def make(name: str, ranks: int, micro_batches: int) -> Schedule:
    return SCHEDULES[name](ranks, micro_batches)


# -------------------------------------------------------------- what a stage holds


class Kept:
    """Takes the place of a tensor that autograd has saved."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Held:
    """Which (stage, forward) autograd keeps tensors of, and the most at a time."""

    def __init__(self) -> None:
        self.live: dict[tuple[int, int], int] = {}
        self.peak = 0

    def add(self, key: tuple[int, int], tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        self.live[key] = self.live.get(key, 0) + 1
        self.peak = max(self.peak, len(self.live))
        weakref.finalize(kept, self.remove, key)
        return kept

    def remove(self, key: tuple[int, int]) -> None:
        self.live[key] -= 1
        if not self.live[key]:
            del self.live[key]


class Watched(nn.Module):
    """A stage's module; every tensor that autograd saves in it is counted."""

    def __init__(self, module: nn.Module, held: Held, stage: int):
        super().__init__()
        self.module, self.held, self.stage, self.forwards = module, held, stage, 0

    def forward(self, *inputs: Tensor):
        key = self.stage, self.forwards
        self.forwards += 1
        pack = lambda tensor: self.held.add(key, tensor)  # noqa: E731
        with saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return self.module(*inputs)


@torch.no_grad()
def descend(modules: list[nn.Module]) -> None:
    """A step of SGD. (The import of torch.optim's takes seconds of each new rank.)"""
    for parameter in {p for module in modules for p in module.parameters()}:
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def train(schedule: Schedule, rows: list[int]) -> dict:
    """Steps with so many rows on this rank, and how far each is from one process."""
    rank, m = dist.get_rank(), schedule.micro_batches
    modules, reference = layers(schedule.stages), layers(schedule.stages)
    held = Held()
    stages = [
        PipelineStage(Watched(modules[s], held, s), s, schedule.stages)
        for s in schedule.stages_of(rank)
    ]
    runner = PipelineRunner(stages, schedule, squares)
    losses, apart = [], []
    for step, count in enumerate(rows):
        inputs, targets = batch(count, seed=step)
        cut = micro_batches(inputs, m), micro_batches(targets, m)
        wanted = dense_loss(reference, *cut)
        losses.append((runner.step(inputs, targets) - wanted).abs().item())
        apart += [worst_gradient(s.module, reference[s.index]) for s in stages]
        order = runner.executed
        descend([*stages, *reference])
    full = with_messages(with_reductions(schedule))
    with torch.no_grad():
        wanted = dense_loss(reference, *cut)
    return {
        "losses": losses,
        "gradients": max(apart),
        "order": order == list(full.actions[rank]),
        "peak": runner.peak_activations,
        "held": held.peak / schedule.chunks,
        "left": len(held.live),
        "evaluated": (runner.evaluate(inputs, targets) - wanted).abs().item(),
    }


def train_all(cases: list[tuple[str, int]]) -> list[dict]:
    """`train`, for each (schedule, micro-batches)."""
    ranks = dist.get_world_size()
    return [train(make(name, ranks, m), [2 * m + 1] * 2 + [m]) for name, m in cases]
