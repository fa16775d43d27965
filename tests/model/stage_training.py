"""Stages of the decoder under a pipeline runner, and the whole decoder beside them."""

from typing import NamedTuple

import pytest
import torch

from tests.model.twins import LIMIT, batch, close, config_of, mask_of
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
from xtrain.pipeline_parallel.micro_batch import micro_batches
from xtrain.schedules import SCHEDULES
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

ROWS = 8  # of a step's batch, which the data ranks share
RATE = 0.05  # of the routers' biases


class Layout(NamedTuple):
    """A schedule over `pipeline` ranks, each of them data x context x tensor ranks.

    With `expert` ranks besides, the data ranks are those of "expert_data". With 0
    tensor ranks the mesh has no such axis.
    """

    schedule: str
    pipeline: int
    data: int = 1
    tensor: int = 1
    expert: int = 0
    micro_batches: int = 0
    context: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.batches * self.context * max(1, self.tensor)

    @property
    def batches(self) -> int:
        """How many ranks bring their own."""
        return self.data * max(1, self.expert)

    def mesh(self):
        of_data = {"data": self.data}
        if self.expert:
            of_data = {"expert_data": self.data, "expert": self.expert}
        of_context = {"context": self.context} if self.context > 1 else {}
        sizes = {"pipeline": self.pipeline, **of_data, **of_context}
        if self.tensor:
            sizes["tensor"] = self.tensor
        return init_mesh(tuple(sizes.values()), tuple(sizes))

    def made(self):
        count = self.micro_batches or 2 * self.pipeline
        return SCHEDULES[self.schedule](self.pipeline, count)


def even_rows(step: int, rank: int, ranks: int):
    """Tokens and labels of a rank of the batch of a step."""
    return [t.chunk(ranks)[rank] for t in batch(step, rows=ROWS)]


def padded_rows(step: int, rank: int, ranks: int):
    """((tokens, positions, mask, documents), labels) of a rank: some ends of rows are
    padding, before them two documents or one."""
    tokens, labels = batch(step, rows=ROWS)
    mask = mask_of(labels)
    documents = (torch.arange(tokens.shape[1]) // 7).repeat(len(tokens), 1)
    documents[::2] = 3
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1) * 2
    inputs = tokens, positions, mask, documents
    *own, labels = [t.chunk(ranks)[rank] for t in (*inputs, labels)]
    return tuple(own), labels


def joined(parts):
    """The batches of several ranks, in order, as one."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return tuple(map(joined, zip(*parts, strict=True)))


def weighted_parts(parts, count):
    """Micro-batches of all ranks together, and the share of the labels of each."""
    labels = joined(parts)[1]
    total = (labels != -100).sum()
    cut = [
        [micro_batches(inputs, count), micro_batches(labels, count)]
        for inputs, labels in parts
    ]
    for i in range(count):
        inputs, labels = joined([(xs[i], ys[i]) for xs, ys in cut])
        yield inputs, labels, (labels != -100).sum().double() / total


def no_loss(logits, labels):
    raise AssertionError("called where the last stage is not")


class StageTraining:
    """This rank's stages and one optimizer of all of them, under a wrapper or bare."""

    def __init__(
        self,
        layout,
        changes,
        dtype=torch.float64,
        lr=0.03,
        wrapper="",
        rows_of=even_rows,
        **options,
    ):
        self.layout, self.mesh, self.rows_of = layout, layout.mesh(), rows_of
        self.schedule = layout.made()
        self.stages = XtrainModel.stages(
            config_of(**changes), self.mesh, self.schedule, dtype=dtype, **options
        )
        self.modules = [stage.module for stage in self.stages]
        self.wrapper = wrapper
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
        for stage, module in zip(self.stages, self.modules, strict=True):
            found = dict(module.named_parameters())
            if self.wrapper == "fsdp":  # which puts its parameters together
                found = stage.module.full_state_dict()
            for name, weight in found.items():
                right = module.placement(name).of(whole[name])
                close(weight, right, f"{what} {name}")

    def accumulate(self, step):
        """All gradients of a step, and its loss."""
        here = batch_group(self.mesh).rank()
        loss = self.runner.step(*self.rows_of(step, here, self.layout.batches))
        for module in self.modules:
            module.sync_gradients()
        return loss.item()


def one_process(
    changes, steps, max_norm=None, rows_of=even_rows, ranks=1, micro_batches=1
):
    """The whole model after these steps, and (loss, norm) of each."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    more = max_norm, rows_of, ranks, micro_batches
    return model, train_whole(model, optimizer, 0, steps, *more)


def train_whole(
    model,
    optimizer,
    first,
    last,
    max_norm=None,
    rows_of=even_rows,
    ranks=1,
    micro_batches=1,
):
    """Loss and norm of each step, on the rows of all these ranks together.

    Micro-batches count as many labels as they have.
    """
    found = []
    for step in range(first, last):
        parts = [rows_of(step, rank, ranks) for rank in range(ranks)]
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels, weight in weighted_parts(parts, micro_batches):
            tokens, *more = inputs if isinstance(inputs, tuple) else (inputs,)
            positions, mask, documents = (*more, None, None, None)[:3]
            options = {"token_mask": mask, "documents": documents}
            loss = weight * model(tokens, labels, positions, **options)
            loss.backward()
            total += loss.item()
        norm = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        found.append((total, norm))
        optimizer.step()
        if model.config.balance_bias:
            model.update_balance_biases(RATE)
    return found


def train_runs(runs, changes, expected, state, digits):
    """Clipped steps of each (layout, options), as those of one process."""
    for layout, options in runs:
        run, what = StageTraining(layout, changes, **options), f"{layout} {options}"
        found = run.train(0, len(expected), LIMIT)
        for step, (mine, right) in enumerate(zip(found, expected, strict=True)):
            assert mine == pytest.approx(right, rel=digits, abs=0), (what, step)
        run.check(state, what)
        for module in run.modules:
            for name, buffer in module.named_buffers():
                assert buffer.any(), "no bias has moved"
                close(buffer, state[name], f"{what} {name}")


def check_training(
    world, runs, changes, steps=3, digits=1e-12, rows_of=even_rows, micro_batches=1
) -> None:
    """Each (layout, options) of `runs`, all of one size, trains as one process does.

    Loss, norm, weights and biases of routers; `digits` is relative. With auxiliary
    losses the one process takes the same `micro_batches`.
    """
    ranks = runs[0][0].batches
    known = changes, steps, LIMIT, rows_of, ranks, micro_batches
    whole, expected = one_process(*known)
    assert min(norm for _, norm in expected) > 2 * LIMIT
    assert bool([*whole.buffers()]) == whole.config.balance_bias
    state = {n: t.detach() for n, t in whole.state_dict(keep_vars=True).items()}
    runs = [(layout, options | {"rows_of": rows_of}) for layout, options in runs]
    world(runs[0][0].size).run(train_runs, runs, changes, expected, state, digits)


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
