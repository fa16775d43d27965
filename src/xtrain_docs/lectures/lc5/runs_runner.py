"""Runs for the page on the runner: its actions, its messages, what it keeps."""

import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from xtrain.comm import CommLedger
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.likes import HEADER
from xtrain.schedules import SCHEDULES

WIDTH = 64
ROWS = 2
"""Of a micro-batch."""
NUMBERS = 64
"""Messages of less bytes are the numbers that ranks agree with."""


class Layer(nn.Module):
    """A residual layer that counts what lives: saved tensors and its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.saved = self.most_saved = self.most_outputs = 0
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self.keep, lambda kept: kept[0]):
            y = x + self.down(torch.tanh(self.up(x)))
        self.outputs = [ref for ref in self.outputs if not ref.expired()]
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        self.most_outputs = max(self.most_outputs, len(self.outputs))
        return y

    def keep(self, tensor: Tensor) -> "Kept":
        if isinstance(tensor, nn.Parameter) or tensor.shape[-2:] == (WIDTH, WIDTH):
            return Kept((tensor,))  # a weight or its transpose: always there
        self.saved += tensor.nbytes
        self.most_saved = max(self.most_saved, self.saved)
        kept = Kept((tensor,))
        weakref.finalize(kept, self.free, tensor.nbytes)
        return kept

    def free(self, nbytes: int) -> None:
        self.saved -= nbytes

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.outputs)


class Kept(list):
    """Stands for a saved tensor; can be referred to weakly."""


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), output.numel()


def runner_of(name: str, micro_batches: int) -> tuple[PipelineRunner, list[Tensor]]:
    """This rank's part of a pipeline, and a batch for it."""
    torch.manual_seed(0)
    schedule = SCHEDULES[name](dist.get_world_size(), micro_batches)
    stages = [
        PipelineStage(Layer(), s, schedule.stages)
        for s in schedule.stages_of(dist.get_rank())
    ]
    batch = [torch.randn(ROWS * micro_batches, WIDTH) for _ in range(2)]
    return PipelineRunner(stages, schedule, squares), batch


def executed(name: str, micro_batches: int) -> list[str]:
    """What a rank did in its second step, in order."""
    runner, batch = runner_of(name, micro_batches)
    for _ in range(2):
        runner.step(*batch)
    return [str(action) for action in runner.executed]


def sent(name: str, micro_batches: int) -> list[dict[str, list[int]]]:
    """Of two steps: [messages, bytes] that a rank sends, by what they are."""
    runner, batch = runner_of(name, micro_batches)
    found = []
    for _ in range(2):
        with CommLedger() as ledger:
            runner.step(*batch)
        counted: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for event in ledger.events:
            if event.kind == "send" and event.nbytes is not None:
                what = kind_of(event.nbytes)
                counted[what] += 1
                nbytes[what] += event.nbytes
        found.append({what: [counted[what], nbytes[what]] for what in sorted(counted)})
    return found


def kind_of(nbytes: int) -> str:
    """What a message is, by its size."""
    if nbytes == 8 * HEADER:
        return "headers"
    return "tensors" if nbytes == 4 * ROWS * WIDTH else "numbers"


def kept(name: str, micro_batches: int) -> list[int]:
    """Most bytes saved, most outputs alive, and outputs alive after the step."""
    runner, batch = runner_of(name, micro_batches)
    runner.step(*batch)
    layers = [stage.module for stage in runner.stages.values()]
    for layer in layers:
        layer.most_saved = layer.most_outputs = 0
    runner.step(*batch)
    return [
        sum(layer.most_saved for layer in layers),
        sum(layer.most_outputs for layer in layers),
        sum(layer.alive() for layer in layers),
    ]
