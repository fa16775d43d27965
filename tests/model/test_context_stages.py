"""Stages of the decoder on context ranks under the runner, against one process."""

import math
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import pad

from tests.model.context_cases import LENGTH, LIMIT, batch
from tests.model.stage_training import wrapped
from tests.model.test_on_a_mesh import close, config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, clip_stages_grad_norm_
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

VERIFIED = (
    "xtrain.model.stages:DecoderStage",
    "xtrain.model.stage_gradients:clip_stages_grad_norm_",
    "xtrain.model.stage_gradients:of_zero",
    "xtrain.model.context:SequenceCut",
    "xtrain.model.gradient_sums:sum_gradients",
    "xtrain.pipeline_parallel.runner:PipelineRunner",
)
AXES = ("pipeline", "data", "context", "tensor")
UNTIED = {"num_hidden_layers": 6, "num_key_value_heads": 2}
TIED = UNTIED | {"tie_word_embeddings": True}
ADAMW, ROWS = {"lr": 0.03}, 9


class Layout(NamedTuple):
    """A schedule over `pipeline` ranks, each of them data x context x tensor ranks."""

    schedule: str
    pipeline: int = 2
    data: int = 1
    context: int = 2
    tensor: int = 1
    wrapper: str = "plain"
    attention: str = "ring"


class Training:
    """The calls that a user makes: stages, wrapper, runner, optimizer."""

    def __init__(self, layout: Layout, changes: dict):
        self.layout = layout
        self.mesh = init_mesh(layout[1:5], AXES)
        self.pipeline, self.data = (self.mesh[axis].get_group() for axis in AXES[:2])
        schedule = SCHEDULES[layout.schedule](layout.pipeline, 4)
        self.stages = XtrainModel.stages(
            config_of(**changes),
            self.mesh,
            schedule,
            context_attention=layout.attention,
            sequence_parallel=layout.tensor > 1,
            dtype=torch.float64,
        )
        self.modules = [stage.module for stage in self.stages]
        self.optimizer = wrapped(self.stages, self.layout.wrapper, self.data, **ADAMW)
        self.runner = PipelineRunner(
            self.stages,
            schedule,
            self.modules[0].loss_fn,
            self.pipeline,
            data_group=self.data,
        )

    def step(self, number: int) -> tuple[float, float]:
        """Loss, and the norm of the gradients before they are clipped."""
        self.optimizer.zero_grad()
        loss = self.runner.step(*rows_of(number, self.layout, self.data.rank()))
        skip = () if self.layout.wrapper == "plain" else ("data",)
        for module in self.modules:
            module.sync_gradients(skip)
        norm = clip_stages_grad_norm_(self.stages, LIMIT)
        self.optimizer.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
        if self.layout.wrapper == "fsdp":
            stages = [stage.module.full_state_dict() for stage in self.stages]
        else:
            stages = [dict(module.named_parameters()) for module in self.modules]
        return {name: p.detach() for stage in stages for name, p in stage.items()}

    def check_weights(self, expected) -> None:
        found = self.weights()
        for module in self.modules:
            for name, _ in module.named_parameters():
                right = module.placement(name).of(expected[name])
                close(found[name], right, f"{self.layout} {name}")


def rows_of(step: int, layout: Layout, rank: int):
    """A data rank's rows, other numbers of them; positions are not given."""
    rows = [ROWS + 2 * r for r in range(layout.data)]
    tokens, labels = batch(step, rows=sum(rows))
    return tokens.split(rows)[rank], labels.split(rows)[rank]


def one_process(layout: Layout, changes: dict, steps: int) -> list[dict]:
    """Of each step: loss, norm, and the weights after it."""
    model, found = XtrainModel(config_of(**changes), dtype=torch.float64), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(steps):
        parts = [rows_of(step, layout, rank) for rank in range(layout.data)]
        tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = model.loss(tokens, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        found.append({"loss": loss.item(), "norm": norm, "weights": weights})
    assert min(step["norm"] for step in found) > 2 * LIMIT
    return found


def trained(cases) -> None:
    for layout, changes, expected in cases:
        run = Training(layout, changes)
        for number, right in enumerate(expected):
            loss, norm = run.step(number)
            assert math.isclose(loss, right["loss"], rel_tol=1e-12), (layout, number)
            assert math.isclose(norm, right["norm"], rel_tol=1e-12), (layout, number)
        run.check_weights(expected[-1]["weights"])


def check(world, size, cases, steps=3):
    world(size).run(trained, [(*case, one_process(*case, steps)) for case in cases])


@pytest.mark.verifies(*VERIFIED)
def test_pipeline_and_context_ranks_train_as_one_process(world):
    """In every kind of schedule, with each attention; tied and mirrored, too."""
    cases = [
        (Layout("one_f_one_b"), TIED),
        (Layout("interleaved", attention="ulysses"), UNTIED),
        (Layout("zb_h1", attention="all_gather"), UNTIED),
        (Layout("zb_v"), TIED),
        (Layout("dualpipe"), TIED),
    ]
    check(world, 4, cases, steps=2)


@pytest.mark.verifies(*VERIFIED)
def test_pipeline_data_and_context_ranks_train_as_one_process(world):
    """Under a wrapper over data; one ZeRO optimizer has the stages of a rank."""
    cases = [
        (Layout("one_f_one_b", 2, 2, 2, wrapper="ddp"), TIED),
        (Layout("zb_v", 2, 2, 2, wrapper="zero 2"), TIED),
        (Layout("interleaved", 2, 2, 2, wrapper="fsdp"), UNTIED),
    ]
    check(world, 8, cases, steps=2)


@pytest.mark.verifies(*VERIFIED)
def test_pipeline_context_and_tensor_ranks_train_as_one_process(world):
    check(world, 8, [(Layout("one_f_one_b", 2, 1, 2, 2), TIED)], steps=2)


def wrong_batches() -> list[str]:
    """A length that zigzag cannot cut, labels of another length; then a good step."""
    run, said = Training(Layout("one_f_one_b"), UNTIED), []
    tokens, labels = rows_of(0, run.layout, 0)
    for wrong in ((tokens[:, 2:], labels[:, 2:]), (tokens, pad(labels, (0, 4)))):
        with pytest.raises(ValueError, match="sequence|labels") as caught:
            run.runner.step(*wrong)
        said.append(str(caught.value))
    loss = run.runner.step(tokens, labels)
    right = XtrainModel(config_of(**UNTIED), dtype=torch.float64).loss(tokens, labels)
    close(loss, right.detach())
    return said


@pytest.mark.verifies(*VERIFIED)
def test_what_stages_cannot_cut_is_said_on_all_ranks(world):
    for length, labels in world(4).run(wrong_batches):
        assert f"a sequence of {LENGTH - 2} cannot be cut into 4 equal parts" in length
        assert f"labels [3, {LENGTH + 4}] for logits [3, {LENGTH // 2}, 24]" in labels
