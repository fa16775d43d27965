"""Functions that run on every rank for the questions of lc5."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline_parallel.small_pipeline import (
    WIDTH,
    SmallPipeline,
    batch,
    drawn,
    layer,
    loss_sum,
)
from xtrain.comm.checks import rank_and_size
from xtrain_docs.lectures.lc5.errata import (
    EXCHANGES,
    FORWARD,
    ORDERS,
    Part,
    Slots,
    before,
)

ROWS = (1, 2, 5, 3)
"""Rows of the micro-batches of an uneven batch."""
DIVISORS = ("rows of the batch", "its own rows, times m", "its own rows, times p")


def divisors(by: str, ranks: int) -> list[float]:
    """By what the loss of each micro-batch is divided."""
    if by == DIVISORS[0]:
        return [float(sum(ROWS))] * len(ROWS)
    times = len(ROWS) if by == DIVISORS[1] else ranks
    return [float(times * rows) for rows in ROWS]


def uneven_batch() -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of micro-batches with 1, 2, 5 and 3 rows."""
    inputs, targets = (drawn(7 + i, sum(ROWS), WIDTH) for i in range(2))
    return list(inputs.split(ROWS)), list(targets.split(ROWS))


def error_of_gradients(by: str) -> float:
    """Of 1F1B on an uneven batch: the largest relative error of a stage's gradient."""
    size = rank_and_size(None)[1]
    inputs, targets = uneven_batch()
    pipeline = SmallPipeline("one_f_one_b", len(ROWS))
    pipeline.step(inputs, targets, divisors(by, size))
    model = nn.Sequential(*map(layer, range(size)))
    x, target = torch.cat(inputs), torch.cat(targets)
    (loss_sum(model(x), target) / len(x)).backward()
    right = {s: next(model[s].parameters()).grad for s in pipeline.weights}
    return max(
        float((weight.grad - right[s]).norm() / right[s].norm())
        for s, weight in pipeline.weights.items()
    )


# ------------------------------------------------------------------ tied embeddings


class Tied(nn.Module):
    """The same matrix as an embedding in the first stage, transposed in the last."""

    def __init__(self, last: bool):
        super().__init__()
        self.weight = nn.Parameter(drawn(50, WIDTH, WIDTH))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.last else self.weight.t())


def tied_weight(summed: bool, steps: int = 3) -> Tensor | None:
    """This rank's copy of the tied matrix after some steps; None in the middle."""
    rank, size = rank_and_size(None)
    ends = dist.new_group([0, size - 1])

    def tied_layer(stage: int) -> nn.Module:
        if stage in (0, size - 1):
            return Tied(last=stage > 0)
        return layer(stage)

    pipeline = SmallPipeline("one_f_one_b", 4, tied_layer)
    weight = pipeline.weights[rank]
    for step in range(steps):
        pipeline.step(*batch(step, 4))
        if summed and rank in (0, size - 1):
            dist.all_reduce(weight.grad, group=ends)
        pipeline.update()
    if rank in (0, size - 1):
        dist.destroy_process_group(ends)
    return weight.detach() if rank in (0, size - 1) else None


# ----------------------------------------- one block with experts, two micro-batches


def too_early(slots: Slots) -> list[str]:
    """Parts that come before what they need, or in the same slot.

    An exchange that the order does not list is taken as done with its computation.
    """
    slot_of = {part: i for i, slot in enumerate(slots) for part in slot}
    problems = []
    for part, slot in slot_of.items():
        needed = before(part)
        if needed is not None and needed not in slot_of:
            needed = before(needed)
        if needed in slot_of and slot_of[needed] >= slot:
            problems.append(f"{part} needs {needed}")
    return problems


def exposed(slots: Slots, computation: float, exchange: float) -> float:
    """How long the slots take beyond their computations."""
    time = sum(
        max(sum(computation for p in slot if p.part not in EXCHANGES),
            sum(exchange for p in slot if p.part in EXCHANGES))
        for slot in slots
    )  # fmt: skip
    parts = [p for slot in slots for p in slot if p.part not in EXCHANGES]
    return time - computation * len(parts)


class Block:
    """Attention and MLP of a block; an MLP is an expert, another one on every rank."""

    def __init__(self) -> None:
        rank = rank_and_size(None)[0]
        self.modules = {"attention": layer(20), "MLP": layer(21 + rank)}
        self.after: dict[Part, Tensor] = {}
        self.graphs: dict[Part, tuple[Tensor, Tensor]] = {}
        self.log: list[str] = []

    def needed(self, part: Part) -> Tensor:
        """What a part works on: of the part before, or this rank's own input."""
        first = before(part)
        if first is not None:
            return self.after[first]
        rank, size = rank_and_size(None)
        seed = 40 + 10 * part.micro_batch + rank + (5 if part.kind == "B" else 0)
        return drawn(seed, 2 * size, WIDTH)

    def issue(self, part: Part) -> Any:
        """Begin an exchange; its output is not there yet, its input is still read."""
        source = self.needed(part)
        self.after[part] = torch.empty_like(source)
        self.log.append(f"issue {part}")
        return dist.all_to_all_single(self.after[part], source, async_op=True)

    def compute(self, part: Part) -> None:
        """Attention or MLP, forward or backward."""
        self.log.append(f"compute {part}")
        forward = part._replace(kind="F")
        if part.kind == "F":
            x = self.needed(part).detach().requires_grad_()
            y = self.modules[part.part](x)
            self.graphs[part], self.after[part] = (x, y), y.detach()
            return
        x, y = self.graphs.pop(forward)
        torch.autograd.backward(y, self.needed(part))
        assert x.grad is not None
        self.after[part] = x.grad

    def run(self, slot: tuple[Part, ...]) -> None:
        """Issue the exchange, compute beside it, wait for it."""
        works = [(p, self.issue(p)) for p in slot if p.part in EXCHANGES]
        for part in slot:
            if part.part not in EXCHANGES:
                self.compute(part)
        for part, work in works:
            work.wait()
            self.log.append(f"wait for {part}")


def ran(order: str) -> tuple[list[str], dict[str, Tensor]]:
    """The log of the order's slots; outputs and gradients at the end of both batches.

    What the order leaves out, forwards before it and backwards after it, is done one
    part after the other.
    """
    block = Block()
    slots = ORDERS[order]
    done = {part for slot in slots for part in slot}
    forwards = [Part("F", name, i) for i in (0, 1) for name in FORWARD]
    backwards = [Part("B", name, i) for i in (0, 1) for name in FORWARD[::-1]]
    first = [p for p in forwards if p not in done]
    for part in first:
        block.run((part,))
    block.log.clear()
    for slot in slots:
        block.run(slot)
    log = list(block.log)
    for part in backwards:
        if part not in done:
            block.run((part,))
    found = {f"output {i}": block.after[Part("F", "combine", i)] for i in (0, 1)}
    for name, module in block.modules.items():
        found[name] = next(module.parameters()).grad
    for i in (0, 1):
        found[f"input {i}"] = block.after[Part("B", "attention", i)]
    return log, found
