"""Whole runs: the same curve in any layout, resumed anywhere, and what they write."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.model.twins import config_of
from xtrain.checkpoint import latest
from xtrain.cluster import VirtualCluster
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.train.processes import ranks
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import (
    Checkpoint,
    Data,
    Evaluate,
    Log,
    OptimizerSpec,
    SampleSpec,
)
from xtrain.train.run import TrainingRun, train
from xtrain.train.sampling import generate
from xtrain.train.sources import samples_of
from xtrain.train.wrap import wrap

RUN = ("xtrain.train.run:train", "xtrain.train.run:TrainingRun",
       "xtrain.train.steps:train_step")  # fmt: skip
DIGITS = 1e-9
MODEL = config_of(vocab_size=257, padded_vocab_size=264, num_key_value_heads=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of text, of four kinds of lines."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    lines = [f"line {n % 4}: " + "abcdefgh"[n % 4 :] for n in range(200)]
    path.write_text("\n".join(lines))
    return str(path)


def recipe(text: str, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "steps": 5, "dtype": "float64", "device": "cpu", "model": MODEL,
        "global_batch": 8, "data": Data(path=text, validation=text, sequence=24),
    }  # fmt: skip
    return Recipe(**(values | changes))


def curve(made: Recipe) -> tuple[list[float], list[float]]:
    result = train(made)
    return result.losses, result.norms


def close(found, expected) -> bool:
    return found == pytest.approx(expected, rel=DIGITS, abs=0)


LAYOUTS = [
    Layout(data=2, micro_batches=2),
    Layout(data=3, zero=1, micro_batches=2),
    Layout(data=3, zero=2),
    Layout(data=2, zero=3, micro_batches=3),
    Layout(data=2, zero=2, micro_batches=2, reduce_at_end=True),
    Layout(tensor=2, sequence_parallel=True, micro_batches=2),
    Layout(pipeline=2, micro_batches=3),
    Layout(pipeline=2, data=2, zero=1, micro_batches=2),
    Layout(context=2, micro_batches=2),
]


@pytest.mark.verifies(
    *RUN,
    "xtrain.train.batches:Batches",
    "xtrain.train.layouts:make_mesh",
    "xtrain.train.sources:samples_of",
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_curve_of_one_process(world, text, layout):
    """Shares of a step differ by a sequence, and so do micro-batches."""
    expected = curve(recipe(text, global_batch=7))
    made = recipe(text, global_batch=7, layout=layout)
    for found in world(layout.gpus).run(curve, made):
        assert close(found[0], expected[0]) and close(found[1], expected[1])


@pytest.mark.verifies(*RUN)
@pytest.mark.parametrize(
    "layout", [Layout(data=2, zero=3), Layout(pipeline=2)], ids=str
)
def test_documents_are_masked_in_any_layout(world, text, layout):
    data = Data(path=text, sequence=24, packing="documents")
    expected = curve(recipe(text, data=data))
    for found in world(2).run(curve, recipe(text, data=data, layout=layout)):
        assert close(found[0], expected[0])


def kept(folder: Path, **changes: Any) -> Checkpoint:
    return Checkpoint(folder=str(folder), **changes)


@pytest.mark.verifies(
    *RUN, "xtrain.train.checkpoints:save", "xtrain.train.checkpoints:load"
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    world, text, tmp_path, workers
):
    data = Data(path=text, sequence=24, workers=workers)
    whole = recipe(text, steps=6, data=data)
    expected = curve(whole)[0]
    parts = [
        (2, Layout(data=2, zero=3)),
        (4, Layout(pipeline=2, micro_batches=2)),
        (6, Layout(tensor=2, data=2, zero=1)),
    ]
    found: list[float] = []
    for steps, layout in parts:
        made = dataclasses.replace(
            whole, steps=6, layout=layout, checkpoint=kept(tmp_path, every=2)
        )
        losses, *_ = world(layout.gpus).run(up_to, made, steps)
        found += losses
    assert close(found, expected)


def up_to(made: Recipe, steps: int) -> list[float]:
    """A run that ends early: its schedules are of all steps."""
    run = TrainingRun(made, torch.device("cpu"))
    while run.step < steps:
        loss, _ = run.train_step(next(run.batches))
        run.step += 1
        run.result.losses.append(loss)
        run.after_step()
    run.close()
    return run.result.losses


@pytest.mark.verifies(*RUN, "xtrain.train.checkpoints:keep_newest")
def test_the_last_checkpoints_are_kept(text, tmp_path):
    train(recipe(text, steps=5, checkpoint=kept(tmp_path, every=1, keep=2)))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [
        "step-00000004",
        "step-00000005",
    ]
    saved = json.loads((tmp_path / "recipe.json").read_text())
    assert saved["recipe"]["steps"] == 5
    again = kept(tmp_path, every=1, keep=1, resume=None)  # below the first run's
    train(recipe(text, steps=3, checkpoint=again))
    names = sorted(p.name[-1] for p in tmp_path.glob("step-*"))
    assert names == ["3", "4", "5"] and latest(tmp_path).name == "step-00000003"


def with_other_options(made: Recipe, spec: OptimizerSpec) -> list[float]:
    """Losses of a run whose optimizer has the options of `spec` after two steps."""
    run = TrainingRun(made, torch.device("cpu"))
    for step in range(made.steps):
        if step == 2:
            for group, decay in zip(
                run.optimizer.param_groups, (spec.weight_decay, 0), strict=True
            ):
                group.update(betas=spec.betas, eps=spec.eps, weight_decay=decay)
        run.result.losses.append(run.train_step(next(run.batches))[0])
        run.step += 1
    run.close()
    return run.result.losses


@pytest.mark.verifies(*RUN, "xtrain.train.saving:Saving")
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(data=2, zero=1), Layout(data=2, zero=3)], ids=str
)
def test_a_run_that_goes_on_has_its_own_options_of_the_optimizer(
    world, text, tmp_path, layout
):
    spec = OptimizerSpec(weight_decay=9.0, betas=(0.5, 0.6), eps=0.1)
    first = recipe(text, steps=4, layout=layout)
    (expected, *_) = world(1).run(with_other_options, recipe(text, steps=4), spec)
    saves = dataclasses.replace(first, checkpoint=kept(tmp_path, every=2))
    world(layout.gpus).run(up_to, saves, 2)
    again = dataclasses.replace(saves, optimizer=spec)
    for losses, _ in world(layout.gpus).run(curve, again):
        assert close(losses, expected[2:])


def resumed(made: Recipe) -> str:
    with pytest.raises(ValueError, match="saved with global_batch=8, and this run has"):
        train(made)
    return "refused"


def unwritable(made: Recipe) -> str:
    with pytest.raises(OSError, match="file"):
        train(made)
    return "refused"


@pytest.mark.verifies(*RUN)
def test_a_folder_that_cannot_be_made_is_named_on_every_rank(world, text, tmp_path):
    (tmp_path / "file").write_text("")
    folder = kept(tmp_path / "file" / "run", resume=None)
    made = recipe(text, layout=Layout(data=2), checkpoint=folder)
    assert world(2).run(unwritable, made) == ["refused"] * 2


@pytest.mark.verifies(*RUN)
def test_another_global_batch_is_refused(world, text, tmp_path):
    train(recipe(text, steps=1, checkpoint=kept(tmp_path)))
    made = recipe(
        text, global_batch=6, layout=Layout(data=2), checkpoint=kept(tmp_path)
    )
    assert world(2).run(resumed, made) == ["refused"] * 2


def refused(made: Recipe, words: str) -> str:
    with pytest.raises(ValueError, match=words):
        train(made)
    return "refused"


@pytest.mark.verifies(*RUN)
def test_what_does_not_fit_is_refused_on_every_rank(world, text):
    cases = [
        (Layout(data=3), {}, r"data 3 .* = 3 ranks, but there are 2"),
        (
            Layout(data=2),
            {"model": config_of(num_key_value_heads=2)},
            "a vocabulary of 257 tokens, and the model one of 24",
        ),
    ]
    for layout, changes, words in cases:
        made = recipe(text, layout=layout, **changes)
        assert world(2).run(refused, made, words) == ["refused"] * 2


def missing(made: Recipe) -> str:
    with pytest.raises(OSError, match=r"gone\.txt"):
        train(made)
    return "refused"


@pytest.mark.verifies(*RUN)
def test_a_file_that_is_not_there_is_named_on_every_rank(world, text):
    data = Data(path=text.replace("text.txt", "gone.txt"), sequence=24)
    made = recipe(text, layout=Layout(data=2), data=data)
    assert world(2).run(missing, made) == ["refused"] * 2


@pytest.mark.verifies(
    *RUN, "xtrain.train.metrics:Writers", "xtrain.train.metrics:Meter"
)
def test_a_line_a_step_and_a_run_that_goes_on_continues_the_file(text, tmp_path):
    log, folder = tmp_path / "run.jsonl", tmp_path / "kept"
    made = recipe(
        text, steps=4, log=Log(jsonl=str(log)), checkpoint=kept(folder, every=2)
    )
    result = train(made)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines] == result.losses  # unrounded
    assert [line["grad_norm"] for line in lines] == result.norms
    assert all(line["tokens_per_s"] > 0 and line["mfu"] is None for line in lines)
    again = dataclasses.replace(
        made, checkpoint=kept(folder, resume=str(folder / "step-00000002"))
    )
    train(again)
    second = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in second] == [1, 2, 3, 4]
    assert second[:2] == lines[:2]
    assert [line["loss"] for line in second] == result.losses


@pytest.mark.verifies(*RUN, "xtrain.train.steps:evaluate")
@pytest.mark.parametrize(
    "layout", [Layout(data=2, zero=3), Layout(pipeline=2)], ids=str
)
def test_the_validation_loss_is_that_of_all_its_labels(world, text, layout):
    """Of the model at the end, in one forward of one process."""
    data = Data(path=text, validation=text, sequence=24, packing="documents")
    asked = Evaluate(every=5, batches=3)
    held = samples_of(data, 257, 0, evaluation=True)
    rows = [held[i] for i in range(3 * 8)]
    tokens, labels, documents = (torch.stack([r[n] for r in rows]) for n in range(3))
    with ranks("cpu") as device:
        alone = TrainingRun(recipe(text, data=data, evaluate=asked), device)
        alone.go()
        with torch.no_grad():
            expected = alone.model(tokens, labels, documents=documents).item()
        alone.close()
    assert alone.result.validation == pytest.approx(expected, rel=DIGITS)
    made = recipe(text, data=data, evaluate=asked, layout=layout)
    for found in world(2).run(validation, made):
        assert found == pytest.approx(expected, rel=DIGITS)


def validation(made: Recipe) -> float | None:
    return train(made).validation


def written(made: Recipe) -> str | None:
    return train(made).text


@pytest.mark.verifies(*RUN, "xtrain.train.sampling:generate")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, zero=3),
        Layout(tensor=2, sequence_parallel=True),
        Layout(context=2),
        Layout(pipeline=2, micro_batches=2),
        Layout(pipeline=2, tensor=2, micro_batches=3, schedule="zb_h1"),
        Layout(pipeline=2, data=2, micro_batches=4, schedule="dualpipe", zero=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_rank_writes_the_text_of_one_process(world, text, layout, temperature):
    sample = SampleSpec(prompt="line ", tokens=6, temperature=temperature)
    expected = written(recipe(text, sample=sample))
    found = world(layout.gpus).run(written, recipe(text, sample=sample, layout=layout))
    assert expected and found == [expected] * layout.gpus


def greedy(prompt: list[int], count: int) -> list[int]:
    """By whole forwards without padding, of the newest eight tokens."""
    model = XtrainModel(MODEL, dtype=torch.float64)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids[-8:]]), gather_logits=True)[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.verifies("xtrain.train.sampling:generate")
@pytest.mark.parametrize("prompt", [[5], [7, 1, 3], list(range(40))])
def test_text_is_that_of_forwards_without_padding(prompt):
    model = wrap(XtrainModel(MODEL, dtype=torch.float64), None, "none")
    found = generate(model, prompt, 12, sequence=8, temperature=0)
    assert found == greedy(prompt, 12)
    end = found[3]
    cut = generate(model, prompt, 12, sequence=8, temperature=0, end=end)
    assert cut == found[: found.index(end) + 1]
    with pytest.raises(ValueError, match="the prompt has no token"):
        generate(model, [], 3, sequence=8)


@pytest.mark.verifies("xtrain.train.metrics:Terminal", "xtrain.train.metrics:printable")
def test_text_gives_a_terminal_no_commands(text, capsys):
    sample = SampleSpec(prompt="é\x1b[2J\r\n\tline ", tokens=1, every=5)
    train(recipe(text, sample=sample))
    told = capsys.readouterr().out
    assert r"é\x1b[2J\r" + "\n\tline " in told
    assert "\x1b" not in told and "\r" not in told


@pytest.mark.verifies(*RUN)
def test_bfloat16_stays_near_float32(text):
    """Masters are fp32: the curve is that of fp32 but for the rounding of products."""
    wide = train(recipe(text, dtype="float32")).losses
    narrow = train(recipe(text, dtype="bfloat16")).losses
    assert narrow == pytest.approx(wide, rel=0.02) and narrow != wide


def on_64(made: Recipe) -> list[float]:
    return train(made).losses


@pytest.mark.verifies(*RUN)
def test_a_run_on_sixteen_virtual_ranks(text):
    layout = Layout(data=2, tensor=2, pipeline=2, context=2, micro_batches=2, zero=3)
    expected = curve(recipe(text, steps=2))[0]
    found = VirtualCluster(16).run(on_64, recipe(text, steps=2, layout=layout))
    assert all(close(losses, expected) for losses in found)


def traced(made: Recipe) -> None:
    train(made)


@pytest.mark.verifies(*RUN, "xtrain.train.profiling:Profile")
def test_each_rank_has_a_trace_of_the_steps_that_are_asked_for(world, text, tmp_path):
    log = Log(profile="2:3", profile_folder=str(tmp_path))
    made = recipe(text, steps=4, layout=Layout(data=2), log=log)
    world(2).run(traced, made)
    for rank in (0, 1):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        steps = {e["name"] for e in events if e["name"].startswith("step ")}
        assert steps == {"step 2", "step 3"}
        assert any("all_reduce" in event["name"] for event in events)


class Events:
    """In place of TensorBoard's writer and of a W&B run."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.setdefault(name, []).append(value)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.add_scalar(name, value, step)

    def close(self) -> None:
        self.found["closed"] = [1.0]

    finish = close


@pytest.mark.verifies(*RUN, "xtrain.train.metrics:scalars")
@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_other_writers_get_every_number_or_name_their_package(text, monkeypatch, kind):
    events, name = (
        Events(),
        "torch.utils.tensorboard" if kind == "tensorboard" else kind,
    )
    made = recipe(text, steps=2, log=Log(**{kind: "runs"}))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"pip install {kind}"):
        train(made)
    package = ModuleType(name)
    vars(package).update(SummaryWriter=lambda folder: events, init=lambda **_: events)
    monkeypatch.setitem(sys.modules, name, package)
    assert train(made).losses == events.found["loss"]
    assert events.found["closed"] and len(events.found["tokens_per_s"]) == 2


def curve_and_steps(made: Recipe) -> list[float]:
    return train(made).losses


@pytest.mark.verifies(*RUN)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_checkpoints_in_the_background_are_those_of_a_run_that_waits(
    world, text, tmp_path, zero
):
    layout = Layout(data=2, zero=zero)
    for background in (False, True):
        folder = kept(
            tmp_path / str(background), every=1, keep=2, background=background
        )
        world(2).run(curve_and_steps, recipe(text, layout=layout, checkpoint=folder))
    names = ["step-00000004", "step-00000005"]
    for name in names:
        waits, goes_on = (
            {f.name: f.read_bytes() for f in (tmp_path / str(b) / name).iterdir()}
            for b in (False, True)
        )
        assert waits == goes_on
    found = {path.name for path in (tmp_path / "True").glob("step-*")}
    assert found == set(names)
    assert not list((tmp_path / "True").glob(".writers-*"))
