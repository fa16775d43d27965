"""The decoder on pipeline, data and tensor ranks by the runner, against one process."""

import math
from typing import NamedTuple

import pytest
import torch

from tests.model.stage_training import Layout, StageTraining
from tests.model.twins import batch, close, config_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.model import XtrainModel

VERIFIED = (
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.pipeline_parallel.shared:SharedGradients",
    "xtrain.model.decoder:XtrainModel",
    "xtrain.model.stages:DecoderStage",
)
CLIP = (
    "xtrain.model.stage_gradients:clip_stages_grad_norm_",
    "xtrain.model.stage_gradients:gradients_of",
    "xtrain.model.stage_gradients:unwrapped",
)
OF_ZERO = pytest.mark.verifies("xtrain.model.stage_gradients:of_zero")
STEPS, LIMIT, SEQUENCE = 3, 0.3, 12
ADAMW = {"lr": 0.03}
UNTIED = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = UNTIED | {"tie_word_embeddings": True}


class Case(NamedTuple):
    """A schedule over two ranks, each of them `data` x `tensor` ranks."""

    schedule: str
    data: int
    tensor: int
    wrapper: str = ""
    sequence_parallel: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.schedule, 2, self.data, self.tensor)


def rows_of(step: int, data: int, rank: int):
    """A data rank's rows: other numbers of them, and of labels; some have none."""
    rows = [9 + 2 * r for r in range(data)]
    tokens, labels = batch(step, rows=sum(rows), sequence=SEQUENCE)
    return tokens.split(rows)[rank], labels.split(rows)[rank]


class Training(StageTraining):
    """The calls that a user makes: stages, wrapper, runner, optimizer."""

    def __init__(self, case: Case, changes: dict):
        self.wrapper = case.wrapper
        super().__init__(
            case.layout,
            changes,
            wrapper=case.wrapper,
            sequence_parallel=case.sequence_parallel,
        )

    def step(self, number: int, right: dict, tolerance: float) -> None:
        """A clipped step, whose loss, norm and gradients are compared."""
        self.wanted = right["grads"]
        ((loss, norm),) = self.train(number, number + 1, LIMIT)
        assert math.isclose(loss, right["loss"], rel_tol=tolerance), number
        assert math.isclose(norm, right["norm"], rel_tol=tolerance), number

    def accumulate(self, step: int) -> float:
        here = self.mesh["data"].get_local_rank()
        loss = self.runner.step(*rows_of(step, self.layout.data, here))
        if not self.wrapper:
            for module in self.modules:
                module.sync_gradients()
        if self.wrapper in ("", "ddp"):  # whole slices are there to be compared
            for module, name, parameter in self.named_parameters():
                right = module.placement(name).of(self.wanted[name])
                close(parameter.grad, right, f"{name} gradient")
        return loss.item()

    def save(self, directory, step: int) -> None:
        if self.wrapper.startswith("zero"):
            self.optimizer.save_sharded(directory, step, self.modules[0])
        elif self.wrapper == "fsdp":
            self.stages[0].module.save_sharded(directory, step, self.optimizer)
        else:
            save_checkpoint(directory, step, self.shards(), self.optimizer)

    def load(self, directory) -> int:
        if self.wrapper.startswith("zero"):
            return self.optimizer.load_sharded(directory, self.modules[0])[0]
        if self.wrapper == "fsdp":
            return self.stages[0].module.load_sharded(directory, self.optimizer)[0]
        return load_checkpoint(directory, self.shards(), self.optimizer)[0]


def one_process(data: int, changes: dict, steps: int = STEPS) -> list[dict]:
    """Of each step: loss, norm, gradients, and the weights after it."""
    model, found = XtrainModel(config_of(**changes), dtype=torch.float64), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(steps):
        parts = [rows_of(step, data, rank) for rank in range(data)]
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
    for case, changes, expected in cases:
        run = Training(case, changes)
        for number, right in enumerate(expected):
            run.step(number, right, 1e-12)
        run.check(expected[-1]["weights"], run.layout)


def relay(cases, changes, expected, directory) -> None:
    """A step in each case, which begins from the checkpoint of the one before."""
    for number, (case, right) in enumerate(zip(cases, expected, strict=True)):
        run = Training(case, changes | ({"seed": 7} if number else {}))
        if number:
            assert run.load(directory) == number
        run.step(number, right, 1e-11)
        run.check(right["weights"], run.layout)
        run.save(directory, number + 1)


def check(world, cases, changes):
    data, size = cases[0].layout.data, cases[0].layout.size
    expected = one_process(data, changes)
    world(size).run(trained, [(one, changes, expected) for one in cases])


@pytest.mark.verifies(*VERIFIED, CLIP[0])
def test_pipeline_and_tensor_ranks_train_as_one_process(world):
    """Sequence parallel or not, in every kind of schedule."""
    untied = [
        Case("interleaved", 1, 2),
        Case("zb_h1", 1, 2, sequence_parallel=True),
    ]
    tied = [
        Case("one_f_one_b", 1, 2, sequence_parallel=True),
        Case("zb_v", 1, 2),
        Case("dualpipe", 1, 2, sequence_parallel=True),
    ]
    check(world, untied, UNTIED)
    check(world, tied, TIED)


@pytest.mark.verifies(*VERIFIED, *CLIP)
@pytest.mark.parametrize(
    "wrapper",
    ["", "ddp", "fsdp", *(pytest.param(f"zero {n}", marks=OF_ZERO) for n in (1, 2))],
)
def test_pipeline_and_data_ranks_train_as_one_process(world, wrapper):
    changes = UNTIED if wrapper == "fsdp" else TIED
    check(world, [Case(name, 2, 1, wrapper) for name in ("zb_v", "dualpipe")], changes)


@pytest.mark.verifies(*VERIFIED, CLIP[0])
def test_pipeline_data_and_tensor_ranks_train_as_one_process(world):
    tied = Case("one_f_one_b", 2, 2, "ddp", sequence_parallel=True)
    check(world, [tied], TIED)
    check(world, [Case("zb_v", 2, 2, "fsdp")], UNTIED)


@pytest.mark.verifies(*VERIFIED, "xtrain.model.decoder_parts:DecoderParts")
def test_a_run_goes_on_from_a_checkpoint_under_another_wrapper(world, tmp_path):
    cases = [
        Case(name, 2, 1, wrapper)
        for name, wrapper in (
            ("one_f_one_b", "ddp"), ("zb_h1", "fsdp"),
            ("one_f_one_b", "zero 2"), ("zb_v", "ddp"),
        )
    ]  # fmt: skip
    expected = one_process(2, UNTIED, steps=len(cases))
    world(4).run(relay, cases, UNTIED, expected, tmp_path)
