"""Stages of the decoder under a pipeline runner, and the whole decoder beside them."""

from typing import NamedTuple

import torch

from tests.model.test_on_a_mesh import batch, close, config_of
from xtrain.checkpoint import Shard
from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import (
    XtrainModel,
    batch_group,
    clip_stages_grad_norm_,
    update_stages_balance_biases,
)
from xtrain.model.layer import DecoderLayer
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

AXES = ("pipeline", "data", "tensor")
ROWS = 8  # of a step's batch, which the data ranks share
RATE = 0.05  # of the routers' biases


class Layout(NamedTuple):
    """A schedule over `pipeline` ranks, each of them `data` x `tensor` ranks.

    With `expert` ranks besides, the data ranks are those of "expert_data".
    """

    schedule: str
    pipeline: int
    data: int = 1
    tensor: int = 1
    expert: int = 0
    micro_batches: int = 0

    @property
    def size(self) -> int:
        return self.pipeline * self.batches * self.tensor

    @property
    def batches(self) -> int:
        """How many ranks bring their own."""
        return self.data * max(1, self.expert)

    def mesh(self):
        if not self.expert:
            return init_mesh((self.pipeline, self.data, self.tensor), AXES)
        sizes = self.pipeline, self.data, self.expert, self.tensor
        return init_mesh(sizes, ("pipeline", "expert_data", "expert", "tensor"))

    def made(self):
        count = self.micro_batches or 2 * self.pipeline
        return SCHEDULES[self.schedule](self.pipeline, count)


def no_loss(logits, labels):
    raise AssertionError("called where the last stage is not")


class StageTraining:
    """This rank's stages and one optimizer of all of them, under a wrapper or bare."""

    def __init__(
        self, layout, changes, dtype=torch.float64, lr=0.03, wrapper="", **options
    ):
        self.layout, self.mesh = layout, layout.mesh()
        self.schedule = layout.made()
        self.stages = XtrainModel.stages(
            config_of(**changes), self.mesh, self.schedule, dtype=dtype, **options
        )
        self.modules = [stage.module for stage in self.stages]
        last = next((m for m in self.modules if m.has_head), None)
        if wrapper:
            self.optimizer = wrapped(self.stages, wrapper, None, lr=lr)
        else:
            parameters = [p for module in self.modules for p in module.parameters()]
            self.optimizer = torch.optim.AdamW(parameters, lr=lr)
        self.runner = PipelineRunner(
            self.stages,
            self.schedule,
            last.loss_fn if last else no_loss,
            self.mesh["pipeline"].get_group(),
            data_group=batch_group(self.mesh),
        )

    def train(self, first, last, max_norm=None):
        """Loss and norm of each step."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.accumulate(step)
            norm = None if max_norm is None else self.clip(max_norm)
            found.append((loss, norm))
            self.optimizer.step()
            if self.modules[0].config.balance_bias:
                update_stages_balance_biases(self.stages, RATE)
        return found

    def clip(self, max_norm):
        return clip_stages_grad_norm_(self.stages, max_norm).item()

    def shards(self) -> list[Shard]:
        return [shard for module in self.modules for shard in module.shards()]

    def named_parameters(self):
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield module, name, parameter

    def check(self, whole, what):
        """Every parameter is its slice of the whole model's."""
        for module, name, parameter in self.named_parameters():
            close(parameter, module.placement(name).of(whole[name]), f"{what} {name}")

    def check_wrapped(self, whole, what):
        """Likewise of stages under FSDP, which puts their parameters together."""
        for stage, module in zip(self.stages, self.modules, strict=True):
            for name, weight in stage.module.full_state_dict().items():
                right = module.placement(name).of(whole[name])
                close(weight, right, f"{what} {name}")

    def accumulate(self, step):
        """All gradients of a step, and its loss."""
        tokens, labels = batch(step, rows=ROWS)
        here, size = batch_group(self.mesh).rank(), self.layout.batches
        tokens, labels = (t.chunk(size)[here] for t in (tokens, labels))
        loss = self.runner.step(tokens, labels)
        for module in self.modules:
            module.sync_gradients()
        return loss.item()


def one_process(changes, steps, lr=0.03, max_norm=None):
    """The whole model after these steps, and (loss, norm) of each."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, train_whole(model, optimizer, 0, steps, max_norm)


def train_whole(model, optimizer, first, last, max_norm=None):
    """Loss and norm of each step, on the batches of `StageTraining`."""
    found = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss, norm = model.loss(*batch(step, rows=ROWS)), None
        loss.backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        found.append((loss.item(), norm))
        optimizer.step()
        if model.config.balance_bias:
            model.update_balance_biases(RATE)
    return found


def wrapped(stages, kind: str, group, **options) -> torch.optim.Optimizer:
    """AdamW of these stages, by which `kind` of data parallelism over `group`."""
    shared = {"process_group": group, "gradient_reduction": "sum"}
    if kind.startswith("zero"):
        every = [p for stage in stages for p in stage.parameters()]
        optimizer = ZeroOptimizer(
            every, torch.optim.AdamW, int(kind[-1]), **shared, **options
        )
        for stage in stages:
            stage.reduction = optimizer
        return optimizer
    for stage in stages:
        if kind == "ddp":
            stage.module = DistributedDataParallel(stage.module, **shared)
        if kind == "fsdp":
            stage.module = FullyShardedDataParallel(
                stage.module, blocks=[DecoderLayer], **shared
            )
    return torch.optim.AdamW([p for s in stages for p in s.parameters()], **options)
