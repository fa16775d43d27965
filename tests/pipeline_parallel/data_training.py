"""The small model in stages on pipeline and data ranks under one wrapper, by name."""

import time
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.pipeline_parallel.pipelines import WIDTH, batch, layers, make, squares
from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING, Collectives
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import Schedule
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

ADAMW = {"lr": 0.02, "weight_decay": 0.1}


class Layout(NamedTuple):
    """A wrapper over `data` ranks, each `pipeline` ranks of a schedule."""

    wrapper: str
    schedule: str
    pipeline: int = 2
    data: int = 2
    micro_batches: int = 4


class Reduced(NamedTuple):
    """A collective over data ranks: which, what it sent, and in which action."""

    op: str
    sent: int
    at: float


class Training:
    """This rank's stages under a wrapper, a runner, and their optimizers.

    Args:
        watch: keep in `log` what is sent over the data ranks.
    """

    def __init__(self, layout: Layout, watch: bool = False):
        self.layout = layout
        shape = layout.pipeline, layout.data
        self.mesh = init_mesh(shape, ("pipeline", "data"))
        self.pipeline, self.data = (
            self.mesh[axis].get_group() for axis in ("pipeline", "data")
        )
        self.here = self.data.rank()
        self.schedule = make(layout.schedule, layout.pipeline, layout.micro_batches)
        self.log: list[Reduced] = []
        model = whole_model(self.schedule.stages + 1)
        if layout.wrapper not in ("plain", "torch fsdp") and self.here:
            for parameter in model.parameters():  # rank 0's are copied to all
                parameter.data.mul_(2)
        self.stages = own_stages(model, self.schedule, self.pipeline.rank())
        self.bare = {stage.index: stage.module for stage in self.stages}
        shared: dict = {
            "process_group": self.data,
            "gradient_reduction": "sum",
        }
        if watch:
            shared["collectives"] = self.logged(RING)
        self.optimizers = self.wrap(shared)
        self.runner = PipelineRunner(
            self.stages, self.schedule, squares, self.pipeline, data_group=self.data
        )

    def wrap(self, shared: dict) -> list:
        """One optimizer for all stages, or for each of its own in ZeRO 2."""
        kind, adamw = self.layout.wrapper, torch.optim.AdamW
        if kind == "zero 1":
            every = [p for stage in self.stages for p in stage.parameters()]
            optimizer = ZeroOptimizer(every, adamw, stage=1, **shared, **ADAMW)
            for stage in self.stages:
                stage.reduction = optimizer
            return [optimizer]
        if kind == "zero 2":
            for stage in self.stages:
                stage.reduction = ZeroOptimizer(
                    stage.parameters(),
                    adamw,
                    stage=2,
                    bucket_cap_mb=2**-10,
                    **shared,
                    **ADAMW,
                )
            return [stage.reduction for stage in self.stages]
        for stage in self.stages:
            if kind == "torch ddp":
                stage.module = nn.parallel.DistributedDataParallel(
                    stage.module, process_group=self.data, bucket_cap_mb=2**-10
                )
            if kind == "torch fsdp":
                for layer in stage.module:
                    fully_shard(layer, mesh=self.mesh["data"])
                fully_shard(stage.module, mesh=self.mesh["data"])
            if kind == "ddp":
                stage.module = DistributedDataParallel(stage.module, **shared)
            if kind.startswith("fsdp"):
                stage.module = FullyShardedDataParallel(
                    stage.module,
                    blocks=[type(layer) for layer in stage.module],
                    reshard_after_forward=kind == "fsdp",
                    **shared,
                )
        return [adamw([p for s in self.stages for p in s.parameters()], **ADAMW)]

    def step(self, number: int) -> Tensor:
        """One step of this data rank's batch; the gradients are those of all."""
        loss = self.runner.step(*rows_of(number, self.here))
        if self.layout.wrapper == "plain":
            for parameter in self.runner.parameters:
                dist.all_reduce(parameter.grad, group=self.data)
        return loss

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Whole and flat, by their names in the whole model."""
        kind = self.layout.wrapper
        if not kind.startswith("zero"):
            parts = {name: p.grad for name, p in self.named_parameters()}
            return self.gathered(parts) if "fsdp" in kind else parts
        parts, names = {}, {p: name for name, p in self.named_parameters()}
        for bucket in (b for o in self.optimizers for b in o.buckets):
            pieces = bucket.layout.pieces(bucket.master.grad, self.here)
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                assert parameter.grad is None  # whole ones are gone
                parts[names[parameter]] = piece
        return self.gathered(parts)

    def weights(self) -> dict[str, Tensor]:
        parts = {name: p.detach() for name, p in self.named_parameters()}
        return self.gathered(parts) if "fsdp" in self.layout.wrapper else parts

    def gathered(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The pieces of all data ranks, one after the other."""
        every: list = [None] * self.layout.data
        own = {n: getattr(t, "_local_tensor", t) for n, t in parts.items()}
        pieces = {n: t.detach().as_subclass(Tensor) for n, t in own.items()}
        mine = {n: t.flatten().cpu() for n, t in pieces.items()}
        dist.all_gather_object(every, mine, group=self.data)
        whole = {name: torch.cat([one[name] for one in every]) for name in parts}
        return {name: t.to(torch.get_default_device()) for name, t in whole.items()}

    def named_parameters(self):
        for index, module in self.bare.items():
            first = (self.schedule.stages + 1) * index // self.schedule.stages
            for name, parameter in module.named_parameters():
                layer, rest = name.split(".", 1)
                yield f"{first + int(layer)}.{rest}", parameter

    def logged(self, inner: Collectives) -> Collectives:
        """The same, which leave in `log` what they sent, and when."""

        def watch(op, function):
            def call(*args, **kwargs):
                began = time.perf_counter()
                with CommLedger() as ledger:
                    work = function(*args, **kwargs)
                self.log.append(Reduced(op, ledger.bytes_sent, began))
                return work

            return call

        names = "all_reduce", "all_gather", "reduce_scatter"
        return replace(inner, **{n: watch(n, getattr(inner, n)) for n in names})

    def action_at(self, when: float):
        """What the runner was at; None before, between and after its actions."""
        for action, (start, end) in zip(
            self.runner.executed, self.runner.times, strict=True
        ):
            if start <= when <= end:
                return action
        return None


def whole_model(count: int) -> nn.Sequential:
    """The same weights on every rank."""
    return nn.Sequential(*layers(count))


def own_stages(
    model: nn.Sequential, schedule: Schedule, rank: int
) -> list[PipelineStage]:
    """A rank's stages, of one layer each or more."""
    count = schedule.stages
    cuts = [len(model) * s // count for s in range(count + 1)]
    return [
        PipelineStage(nn.Sequential(*model[cuts[s] : cuts[s + 1]]), s, count)
        for s in schedule.stages_of(rank)
    ]


def rows_of(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """A data rank's batch: other rows, other numbers of them, and of valid ones."""
    inputs, targets = batch(9 + 2 * data_rank + step, WIDTH, 100 * step + data_rank)
    targets[: 2 * data_rank] = 0.0
    return inputs, targets


def whole_batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    parts = [rows_of(step, rank) for rank in range(data)]
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


class OneProcess:
    """The same without any other rank, on the batches of all."""

    def __init__(self, layers: int, data: int):
        self.model, self.data = whole_model(layers), data
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of the whole batch, and every gradient."""
        inputs, targets = whole_batch(number, self.data)
        self.model.zero_grad()
        total, count = squares(self.model(inputs), targets)
        loss = total / count.clamp(min=1)
        loss.backward()
        named = self.model.named_parameters()
        return loss.detach(), {name: p.grad.clone() for name, p in named}

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters()}


def largest_error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((found[n].flatten() - right[n].flatten()).abs().max() for n in found)
