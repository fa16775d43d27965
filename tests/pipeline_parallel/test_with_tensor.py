"""The decoder on pipeline, data and tensor ranks by the runner, against one process."""

import math
from typing import NamedTuple

import pytest
import torch

from tests.model.stage_training import wrapped
from tests.model.test_on_a_mesh import batch, close, config_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, clip_stages_grad_norm_
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

VERIFIED = (
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.pipeline_parallel.shared:SharedGradients",
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.stages:DecoderStage",
)
CLIP = (
    "xtrain.model.stage_gradients:clip_stages_grad_norm_",
    "xtrain.model.stage_gradients:gradients_of",
    "xtrain.model.stage_gradients:of_zero",
    "xtrain.model.stage_gradients:unwrapped",
)
STEPS, LIMIT, SEQUENCE = 3, 0.3, 12
ADAMW = {"lr": 0.03}
UNTIED = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = UNTIED | {"tie_word_embeddings": True}
AXES = ("pipeline", "data", "tensor")


class Layout(NamedTuple):
    """A schedule over `pipeline` ranks, each of them `data` x `tensor` ranks."""

    schedule: str
    pipeline: int = 2
    data: int = 1
    tensor: int = 1
    wrapper: str = "plain"
    sequence_parallel: bool = False


def rows_of(step: int, layout: Layout, rank: int):
    """A data rank's rows: other numbers of them, and of labels; some have none."""
    rows = [9 + 2 * r for r in range(layout.data)]
    tokens, labels = batch(step, rows=sum(rows), sequence=SEQUENCE)
    return tokens.split(rows)[rank], labels.split(rows)[rank]


class Training:
    """The calls that a user makes: stages, wrapper, runner, optimizer."""

    def __init__(self, layout: Layout, changes: dict):
        self.layout = layout
        self.mesh = init_mesh((layout.pipeline, layout.data, layout.tensor), AXES)
        self.pipeline, self.data = (self.mesh[axis].get_group() for axis in AXES[:2])
        self.schedule = SCHEDULES[layout.schedule](layout.pipeline, 4)
        self.stages = XtrainModel.stages(
            config_of(**changes),
            self.mesh,
            self.schedule,
            dtype=torch.float64,
            sequence_parallel=layout.sequence_parallel,
        )
        self.modules = [stage.module for stage in self.stages]
        self.optimizer = wrapped(self.stages, self.layout.wrapper, self.data, **ADAMW)
        self.runner = PipelineRunner(
            self.stages,
            self.schedule,
            self.modules[0].loss_fn,
            self.pipeline,
            data_group=self.data,
        )

    def step(self, number: int) -> tuple[float, float]:
        """Loss, and the norm of the gradients before it is clipped."""
        self.optimizer.zero_grad()
        batch_here = rows_of(number, self.layout, self.data.rank())
        loss = self.runner.step(*batch_here)
        if self.layout.wrapper == "plain":
            for module in self.modules:
                module.sync_gradients()
        self.check_gradients()
        norm = clip_stages_grad_norm_(self.stages, LIMIT)
        self.optimizer.step()
        return loss.item(), norm.item()

    def check_gradients(self) -> None:
        """Against `self.wanted`, where whole slices are there to be compared."""
        if self.layout.wrapper in ("plain", "ddp"):
            for name, place, parameter in self.named_parameters():
                close(parameter.grad, place.of(self.wanted[name]), f"{name} gradient")

    def named_parameters(self):
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield name, module.placement(name), parameter

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's slices, whole, of each of its stages."""
        if self.layout.wrapper != "fsdp":
            return {name: p.detach() for name, _, p in self.named_parameters()}
        return {
            n: t for s in self.stages for n, t in s.module.full_state_dict().items()
        }

    def save(self, directory, step: int) -> None:
        if self.layout.wrapper.startswith("zero"):
            self.optimizer.save_sharded(directory, step, self.modules[0])
        elif self.layout.wrapper == "fsdp":
            self.stages[0].module.save_sharded(directory, step, self.optimizer)
        else:
            save_checkpoint(directory, step, self.shards(), self.optimizer)

    def load(self, directory) -> int:
        if self.layout.wrapper.startswith("zero"):
            return self.optimizer.load_sharded(directory, self.modules[0])[0]
        if self.layout.wrapper == "fsdp":
            return self.stages[0].module.load_sharded(directory, self.optimizer)[0]
        return load_checkpoint(directory, self.shards(), self.optimizer)[0]

    def shards(self):
        return [shard for module in self.modules for shard in module.shards()]


def one_process(layout: Layout, changes: dict, steps: int = STEPS) -> list[dict]:
    """Of each step: loss, norm, gradients, and the weights after it."""
    model, found = XtrainModel(config_of(**changes), dtype=torch.float64), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(steps):
        parts = [rows_of(step, layout, rank) for rank in range(layout.data)]
        tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = model.loss(tokens, labels)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        found.append(
            {"loss": loss.item(), "norm": norm, "grads": gradients, "weights": weights}
        )
    assert min(step["norm"] for step in found) > 2 * LIMIT
    return found


def trained(cases) -> None:
    """STEPS clipped steps of each case, against those of one process."""
    for layout, changes, expected in cases:
        run = Training(layout, changes)
        for number, right in enumerate(expected):
            run.wanted = right["grads"]
            loss, norm = run.step(number)
            assert math.isclose(loss, right["loss"], rel_tol=1e-12), (layout, number)
            assert math.isclose(norm, right["norm"], rel_tol=1e-12), (layout, number)
        found = run.weights()
        for name, place, _ in run.named_parameters():
            whole = expected[-1]["weights"][name]
            close(found[name], place.of(whole), f"{layout} {name}")


def relay(layouts, changes, expected, directory) -> None:
    """A step in each layout, which begins from the checkpoint of the one before."""
    for number, (layout, right) in enumerate(zip(layouts, expected, strict=True)):
        run = Training(layout, changes | ({"seed": 7} if number else {}))
        if number:
            assert run.load(directory) == number
        run.wanted = right["grads"]
        loss, norm = run.step(number)
        assert math.isclose(loss, right["loss"], rel_tol=1e-11), (layout, number)
        assert math.isclose(norm, right["norm"], rel_tol=1e-11), (layout, number)
        found = run.weights()
        for name, place, _ in run.named_parameters():
            close(found[name], place.of(right["weights"][name]), f"{layout} {name}")
        run.save(directory, number + 1)


def check(world, layouts, changes):
    cases = [(one, changes, one_process(one, changes)) for one in layouts]
    first = layouts[0]
    world(first.pipeline * first.data * first.tensor).run(trained, cases)


@pytest.mark.verifies(*VERIFIED, CLIP[0])
def test_pipeline_and_tensor_ranks_train_as_one_process(world):
    """Sequence parallel or not, in every kind of schedule."""
    untied = [
        Layout("interleaved", 2, 1, 2),
        Layout("zb_h1", 2, 1, 2, sequence_parallel=True),
    ]
    tied = [
        Layout("one_f_one_b", 2, 1, 2, sequence_parallel=True),
        Layout("zb_v", 2, 1, 2),
        Layout("dualpipe", 2, 1, 2, sequence_parallel=True),
    ]
    check(world, untied, UNTIED)
    check(world, tied, TIED)


@pytest.mark.verifies(*VERIFIED, *CLIP)
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "zero 1", "zero 2", "fsdp"])
def test_pipeline_and_data_ranks_train_as_one_process(world, wrapper):
    changes = UNTIED if wrapper == "fsdp" else TIED
    check(world, [Layout(s, 2, 2, 1, wrapper) for s in ("zb_v", "dualpipe")], changes)


@pytest.mark.verifies(*VERIFIED, CLIP[0])
def test_pipeline_data_and_tensor_ranks_train_as_one_process(world):
    tied = Layout("one_f_one_b", 2, 2, 2, "ddp", sequence_parallel=True)
    check(world, [tied], TIED)
    check(world, [Layout("zb_v", 2, 2, 2, "fsdp")], UNTIED)


@pytest.mark.verifies(*VERIFIED, "xtrain.model.decoder_parts:DecoderParts")
def test_a_run_goes_on_from_a_checkpoint_under_another_wrapper(world, tmp_path):
    layouts = [
        Layout("one_f_one_b", 2, 2, 1, "ddp"),
        Layout("zb_h1", 2, 2, 1, "fsdp"),
        Layout("one_f_one_b", 2, 2, 1, "zero 2"),
        Layout("zb_v", 2, 2, 1, "ddp"),
    ]
    expected = one_process(layouts[0], UNTIED, steps=len(layouts))
    world(4).run(relay, layouts, UNTIED, expected, tmp_path)
