"""Functions that run on every rank for the errata and the questions of lc5."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pipeline_parallel.waiting_sends import is_send, posts
from xtrain.cluster.per_rank import replaced
from xtrain.comm.checks import rank_and_size
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.shared import SharedGradients
from xtrain.schedules import SCHEDULES, Schedule, one_f_one_b, with_messages
from xtrain.schedules.action import Action
from xtrain.schedules.passes import message_peer
from xtrain_docs.lectures.lc5.errata import (
    EXCHANGES,
    FORWARD,
    ORDERS,
    Part,
    Slots,
    before,
)

ROWS, WIDTH = 3, 4


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


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


def mean_loss(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """What a runner divides once, by the rows of the whole batch."""
    return loss_sum(y, target), len(y)


# ----------------------------------------------------------------------- gradients


def gradient_of(rows: Sequence[int], divisors: Sequence[float]) -> Tensor:
    """Of this rank's stage under 1F1B, for micro-batches with so many rows.

    A runner cuts evenly, so each micro-batch is filled up with rows of weight 0.

    Args:
        divisors: of the loss of each micro-batch.
    """
    (rank, size), m, most = rank_and_size(None), len(rows), max(rows)

    def filled_up(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([F.pad(p, (0, 0, 0, most - len(p))) for p in parts])

    inputs, targets = (drawn(i, sum(rows), WIDTH).split(list(rows)) for i in (1, 2))
    parts = zip(rows, divisors, strict=True)
    weights = [torch.full((n, 1), 1 / by, dtype=torch.float64) for n, by in parts]
    stage = PipelineStage(layer(rank), rank, size)
    runner = PipelineRunner(
        stage,
        one_f_one_b(size, m),
        lambda y, target: (((y - target[0]) ** 2 * target[1]).sum(), 1 / m),
    )
    batch_of_all = filled_up(inputs), (filled_up(targets), filled_up(weights))
    runner.step(*batch_of_all)
    return runner.parameters[0].grad


def parts_of_gradients(name: str, micro_batches: int) -> dict[int, Tensor]:
    """Of the stages of this rank, before those of mirrored copies are summed."""
    rank, size = rank_and_size(None)
    schedule = SCHEDULES[name](size, micro_batches)
    stages = [PipelineStage(layer(s), s, size) for s in schedule.stages_of(rank)]
    runner = PipelineRunner(stages, schedule, mean_loss)
    with (
        replaced(SharedGradients, "begin", lambda *_: None),
        replaced(SharedGradients, "sum", lambda *_, **__: None),
    ):
        runner.step(*map(torch.cat, batch(0, micro_batches)))
    return {stage.index: next(stage.parameters()).grad for stage in stages}


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
    is_end = rank in (0, size - 1)
    module = Tied(last=rank > 0) if is_end else layer(rank)
    (weight,) = module.parameters()
    shared = {"tied": weight} if summed and is_end else {}
    stage = PipelineStage(module, rank, size, shared=shared)
    runner = PipelineRunner(stage, one_f_one_b(size, 4), mean_loss)
    for step in range(steps):
        runner.step(*map(torch.cat, batch(step, 4)))
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            weight.grad = None
    return weight.detach() if is_end else None


# ------------------------------------------------------------- messages, one by one


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
    """A message of one number, to or from the neighbour."""
    call = dist.isend if is_send(message) else dist.irecv
    return call(torch.zeros(1), message_peer(schedule, message), group=group)


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
