"""Saved by any layout, trained on by any other: the loss curve goes on exactly."""

import dataclasses

import pytest
import torch

from tests.model.stage_training import even_rows, train_whole
from tests.model.twins import LIMIT, config_of
from tests.train.layouts import name_of
from tests.train.test_layouts import DENSE, DIGITS, EXPERTS, adamw, wrapped
from xtrain.checkpoint import (
    CheckpointError,
    CheckpointReader,
    latest,
    save_checkpoint,
)
from xtrain.model import XtrainModel
from xtrain.model.config import padded_for
from xtrain.model.parameters import TABLES
from xtrain.plan import Layout
from xtrain.train.checkpoints import load, save, shards_of
from xtrain.train.optimizers import make_optimizer
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.steps import accumulate, clip_grad_norm

BEFORE, ALL = 2, 4
SYMBOLS = ("xtrain.train.checkpoints:save", "xtrain.train.checkpoints:load")
ONE = Layout(micro_batches=4)
TIED = DENSE | {"tie_word_embeddings": True}
PAIRS = [
    (ONE, Layout(data=2, zero=3, micro_batches=2)),
    (Layout(data=2, zero=1, micro_batches=2), ONE),
    (Layout(data=4, zero=2), Layout(pipeline=2, data=2, zero=3, micro_batches=2)),
    (
        Layout(pipeline=2, tensor=2, micro_batches=4, schedule="zb_v", chunks=2),
        Layout(data=2, context=2, zero=3, micro_batches=2),
    ),
    (
        Layout(pipeline=2, data=2, zero=1, micro_batches=4, schedule="dualpipe"),
        Layout(tensor=2, data=2, zero=2, micro_batches=2),
    ),
    (Layout(data=2, zero=3, micro_batches=2), Layout(pipeline=3, micro_batches=4)),
]
WITH_EXPERTS = [
    (
        Layout(data=4, expert=2, zero=3),
        Layout(pipeline=2, data=2, expert=2, zero=1, micro_batches=2),
    ),
    (ONE, Layout(data=2, expert=2, tensor=2, zero=2, micro_batches=2)),
    (Layout(pipeline=2, data=2, expert=2, zero=2, micro_batches=2), ONE),
]


def steps(model, optimizer, layout, first, last):
    """Loss and norm of each."""
    found = []
    for step in range(first, last):
        batch = even_rows(step, model.data_group.rank(), layout.data)
        loss = accumulate(model, *batch, micro_batches=layout.micro_batches)
        found.append((loss.item(), clip_grad_norm(model, LIMIT).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def made(config, layout, **changes):
    model = wrapped(config, layout)
    options = {k: v for k, v in adamw(None).items() if k != "params"} | changes
    return model, model.optimizer(torch.optim.AdamW, **options)


def begin(layout, config, directory, expected):
    model, optimizer = made(config, layout)
    found = steps(model, optimizer, layout, 0, BEFORE)
    for mine, right in zip(found, expected, strict=False):
        assert mine == pytest.approx(right, rel=DIGITS, abs=0)
    save(directory, BEFORE, model, optimizer, {"tokens": 7})


def go_on(layout, config, directory, expected):
    """From other weights and another rate."""
    model, optimizer = made(config, layout, lr=0.5)
    assert load(directory, model, optimizer) == (BEFORE, {"tokens": 7})
    found = steps(model, optimizer, layout, BEFORE, ALL)
    for mine, right in zip(found, expected[BEFORE:], strict=True):
        assert mine == pytest.approx(right, rel=DIGITS, abs=0)


def curve(changes):
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    others = [p for p in model.parameters() if p.dim() <= 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [adamw(matrices), adamw(others) | {"weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    return train_whole(model, optimizer, 0, ALL, LIMIT, even_rows, 4, 1)


def check(world, pair, changes, directory):
    first, second = pair
    expected, config = curve(changes), config_of(**changes)
    world(first.gpus).run(begin, first, config, directory, expected)
    other = config_of(**changes | {"seed": 5})
    world(second.gpus).run(go_on, second, other, directory, expected)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{name_of(pair[0])}-to-{name_of(pair[1])}"
)
def test_another_layout_goes_on_with_the_curve_of_one_process(world, tmp_path, pair):
    tied = 3 not in (pair[0].zero, pair[1].zero)
    check(world, pair, TIED if tied else DENSE, str(tmp_path))


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize(
    "pair", WITH_EXPERTS, ids=lambda pair: f"{name_of(pair[0])}-to-{name_of(pair[1])}"
)
def test_with_experts_another_layout_goes_on(world, tmp_path, pair):
    check(world, pair, EXPERTS, str(tmp_path))


VOCABULARY = 25
RESIZED = [
    Layout(tensor=2),
    Layout(tensor=3),
    Layout(tensor=4),
    ONE,
    Layout(tensor=2, data=2, zero=3, micro_batches=2),
    Layout(tensor=3, pipeline=2, micro_batches=4),
    Layout(tensor=2, data=2, zero=1, micro_batches=2),
]
"""26, 27, 28 and 25 rows of embedding and head."""


def rows_of_padding(model, optimizer):
    """The rows of this rank beyond the vocabulary: weights, gradients and state."""
    for name, parameter in model.named_parameters():
        place, state = model.placement(name), optimizer.state.get(parameter, {})
        if name in TABLES and parameter.dim() == 2:
            first = max(0, VOCABULARY - place.box(parameter.shape).offset[0])
            tensors = [parameter, parameter.grad, *state.values()]
            yield from (t[first:] for t in tensors if t is not None and t.dim() == 2)


def resized(layout, changes, spec, directory, first, expected):
    config = padded_for(config_of(**changes), layout.tensor)
    model = wrapped(config, layout)
    optimizer = make_optimizer(model, spec)
    if first:
        assert load(directory, model, optimizer)[0] == first
    batch = even_rows(first, model.data_group.rank(), layout.data)
    loss = accumulate(model, *batch, micro_batches=layout.micro_batches)
    mine = loss.item(), clip_grad_norm(model, LIMIT).item()
    digits = DIGITS if spec.kind == "adamw" else 1e-5  # its products are in fp32
    assert mine == pytest.approx(expected[first], rel=digits, abs=0), layout
    optimizer.step()
    padding = [rows for rows in rows_of_padding(model, optimizer) if len(rows)]
    assert not any(rows.any() for rows in padding)
    save(directory, first + 1, model, optimizer)
    return len(padding)


@pytest.mark.verifies(*SYMBOLS, "xtrain.model.config:padded_for")
@pytest.mark.parametrize(("kind", "tied"), [("adamw", False), ("muon", True)])
def test_the_padding_of_a_vocabulary_follows_the_tensor_ranks(
    world, tmp_path, kind, tied
):
    """Rows of padding are in no checkpoint, and get neither gradient nor state."""
    changes = DENSE | {"vocab_size": VOCABULARY, "num_key_value_heads": 12,
                       "tie_word_embeddings": tied}  # fmt: skip
    spec = OptimizerSpec(kind=kind, lr=0.03, eps=1e-3, ns_dtype="float32")
    path, count = str(tmp_path), len(RESIZED)
    expected = world(1).run(whole_run, changes, spec, count)[0]
    for turn, layout in enumerate(RESIZED[: 4 if kind == "muon" else None]):
        what = layout, changes, spec, path, turn, expected
        seen = sum(world(layout.gpus).run(resized, *what))
        assert seen or layout.tensor == 1 or layout.zero
        with CheckpointReader(latest(path)) as reader:
            assert reader.about("embed_tokens.weight").shape == (VOCABULARY, 7)


def whole_run(changes, spec, count):
    model = wrapped(config_of(**changes), ONE)
    optimizer = make_optimizer(model, spec)
    return steps(model, optimizer, ONE, 0, count)


def older(directory):
    """A checkpoint with rows of padding, as they were once saved."""
    for rows, fits in ((28, True), (26, False)):
        config = config_of(**DENSE, vocab_size=VOCABULARY, padded_vocab_size=28)
        model = wrapped(config, ONE)
        shards = [
            dataclasses.replace(shard, rows=None, tensor=shard.tensor.detach())
            for shard in shards_of(model)
        ]
        save_checkpoint(directory, 1, shards)
        again = wrapped(dataclasses.replace(config, padded_vocab_size=rows), ONE)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter[:VOCABULARY] = 5.0
        if fits:
            load(directory, again)
            pairs = zip(model.parameters(), again.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        else:
            told = r"lm_head.weight: \[28, 7\] in the checkpoint, \[25, 7\] here"
            with pytest.raises(CheckpointError, match=told):
                load(directory, again)


@pytest.mark.verifies("xtrain.checkpoint.index:compare")
def test_older_checkpoints_with_padding_are_read_by_the_same_padding(world, tmp_path):
    world(1).run(older, str(tmp_path))


def another_model(layout, config, directory):
    model, optimizer = made(config, layout)
    before = [p.detach().clone() for _, p in model.named_parameters()]
    with pytest.raises(CheckpointError, match=r"layers\.4\.\S+: not in the checkpoint"):
        load(directory, model, optimizer)
    after = [p for _, p in model.named_parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_another_model_is_refused_on_every_rank(world, tmp_path, zero):
    world(1).run(begin, ONE, config_of(**DENSE), str(tmp_path), [])
    larger = config_of(**DENSE | {"num_hidden_layers": 5})
    layout = Layout(data=2, pipeline=2, micro_batches=2, zero=zero)
    world(4).run(another_model, layout, larger, str(tmp_path))
