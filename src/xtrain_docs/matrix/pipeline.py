"""The model of the support matrix in stages, on pipeline and data ranks.

embedding | block 0 | block 1 | head      cut into 2 or 4 virtual stages
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import SCHEDULES
from xtrain.zero import ZeroOptimizer, clip_sharded_grad_norm_

from .setup import STEPS, Setup
from .toy import Toy, batch, loss_of, make
from .wrappers import Wrapped, wrap


class ToyStage(nn.Module):
    """Some of a Toy's parts, under the names that they have there."""

    def __init__(self, toy: Toy, parts: range):
        super().__init__()
        self.recompute, last = toy.recompute, len(toy.layers) + 1
        self.embedding = toy.embedding if 0 in parts else None
        self.layers = nn.ModuleList()
        for number in parts:
            if 0 < number < last:
                self.layers.add_module(str(number - 1), toy.layers[number - 1])
        self.head = toy.head if last in parts else None
        self.offset = toy.offset if last in parts else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = self.recompute(layer, x) if self.recompute else layer(x)
        return x if self.head is None else self.head(x) + self.offset


class PipelineRun:
    """A case on one rank of two pipelines."""

    def __init__(self, setup: Setup, data: ProcessGroup, pipeline: ProcessGroup):
        self.setup, self.data, self.pipeline = setup, data, pipeline
        schedule = SCHEDULES[setup.schedule](setup.pipeline, setup.micro_batches)
        # Data ranks begin elsewhere: a missing broadcast would show.
        toy = make(data.rank(), setup.dtype, **setup.model)
        if toy.head.weight is toy.embedding.weight:  # a copy for the last stage
            toy.head.weight = nn.Parameter(toy.head.weight.detach().clone())
        self.wrapped: list[Wrapped] = []
        stages = []
        for index in schedule.stages_of(pipeline.rank()):
            parts = self.parts(index, schedule.stages)
            bare = ToyStage(toy, parts)
            wrapped = wrap(bare, setup, data, None)
            self.wrapped.append(wrapped)
            stages.append(self.stage(bare, wrapped, index, schedule.stages))
        self.runner = PipelineRunner(
            stages, schedule, summed, pipeline, data_group=data
        )

    def parts(self, index: int, stages: int) -> range:
        size = 4 // stages
        return range(size * index, size * (index + 1))

    def stage(
        self, bare: ToyStage, wrapped: Wrapped, index: int, count: int
    ) -> PipelineStage:
        shared = {}
        if self.setup.model.get("tied"):
            for end in (bare.embedding, bare.head):
                if end is not None:
                    shared["tied"] = end.weight
        zero: Any = wrapped.optimizer
        reduction = zero if isinstance(zero, ZeroOptimizer) else None
        return PipelineStage(
            wrapped.model, index, count, shared=shared, reduction=reduction
        )

    def weights(self) -> dict[str, Tensor]:
        """Train, then give whole tensors by name."""
        setup = self.setup
        for step in range(STEPS):
            rows = [
                batch(step, micro, self.data.rank(), 0, setup.length)
                for micro in range(setup.micro_batches)
            ]
            tokens = torch.cat(rows)
            low = setup.autocast
            with torch.autocast(tokens.device.type, low, enabled=low is not None):
                self.runner.step(tokens, tokens)
            self.clip()
            for wrapped in self.wrapped:
                wrapped.optimizer.step()
                wrapped.optimizer.zero_grad()
        own = {n: t for wrapped in self.wrapped for n, t in wrapped.weights().items()}
        every: list[Any] = [None] * self.pipeline.size()
        dist.all_gather_object(every, own, group=self.pipeline)
        return {n.removeprefix("module."): t for d in every for n, t in d.items()}

    def clip(self) -> None:
        """By the norm of all stages; what data ranks hold alike counts on the first."""
        if self.setup.max_norm is None:
            return
        counts, gradients = [], []
        for wrapped in self.wrapped:
            found = [g.as_subclass(Tensor) for g in wrapped.gradients()]
            gradients += found
            counts += [wrapped.sharded or self.data.rank() == 0] * len(found)
        clip_sharded_grad_norm_(gradients, self.setup.max_norm, None, counts)


def summed(logits: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    """A sum that nothing divides."""
    return loss_of(logits, tokens), 0
