"""Muon beside AdamW in the trainer: any layout trains as one process does."""

import copy
import dataclasses

import pytest
import torch

from tests.model.stage_training import even_rows
from tests.model.twins import LIMIT, config_of
from tests.train.layouts import name_of
from tests.train.test_layouts import DENSE, EXPERTS, wrapped
from xtrain.checkpoint import CheckpointError
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.train.checkpoints import load, save
from xtrain.train.optimizers import make_optimizer
from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.steps import accumulate, clip_grad_norm

SPEC = OptimizerSpec(kind="muon", lr=0.02, ns_dtype="float32", eps=1e-3)
STEPS, DIGITS = 4, 1e-5  # products of Newton-Schulz are in fp32
SYMBOLS = (
    "xtrain.train.optimizers:make_optimizer",
    "xtrain.train.optimizers:MuonAndAdamW",
)
LAYOUTS = [
    Layout(data=2, micro_batches=2),
    Layout(data=3, zero=3),
    Layout(data=3, zero=1, micro_batches=2),
    Layout(data=3, zero=2, micro_batches=2),
    Layout(tensor=2, sequence_parallel=True, micro_batches=2),
    Layout(pipeline=2, micro_batches=4),
    Layout(pipeline=2, data=2, zero=3, micro_batches=2),
    Layout(pipeline=2, data=2, zero=2, micro_batches=2),
    Layout(data=2, tensor=2, zero=1, sequence_parallel=True, micro_batches=2),
    Layout(data=2, tensor=2, context=2, zero=2, micro_batches=2),
    Layout(data=2, tensor=2, context=2, zero=3, micro_batches=2),
    Layout(data=4, zero=3, replicate=2),
    Layout(pipeline=2, micro_batches=4, schedule="dualpipe"),
    Layout(pipeline=2, data=2, zero=1, micro_batches=4, schedule="dualpipe"),
]


def made(layout, changes):
    model = wrapped(config_of(**changes), layout)
    return model, make_optimizer(model, SPEC)


def steps(model, optimizer, layout, first, last):
    found, rank = [], model.data_group.rank()
    for step in range(first, last):
        whole = even_rows(step, 0, 1)
        mine = [t.tensor_split(layout.data)[rank] for t in whole]
        loss = accumulate(model, *mine, micro_batches=layout.micro_batches)
        found.append((loss.item(), clip_grad_norm(model, LIMIT).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained(layout, changes):
    return steps(*made(layout, changes), layout, 0, STEPS)


def by_torch(changes):
    """One process, by torch's own optimizers; products in fp32, as SPEC has them."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    named = dict(model.named_parameters())
    hidden = {n for n, p in named.items() if p.dim() == 2 and n.startswith("layers")}
    muon = torch.optim.Muon(
        [named[n] for n in hidden], lr=SPEC.lr, weight_decay=SPEC.weight_decay,
        momentum=SPEC.momentum, adjust_lr_fn=SPEC.adjust_lr_fn,
    )  # fmt: skip
    rest = [p for n, p in named.items() if n not in hidden]
    groups = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=SPEC.lr, betas=SPEC.betas, eps=SPEC.eps, weight_decay=0.1
    )
    found = []
    for step in range(STEPS):
        loss = model(*even_rows(step, 0, 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        found.append((loss.item(), norm.item()))
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return found


def close(found, expected, digits=DIGITS):
    for mine, right in zip(found, expected, strict=True):
        assert mine == pytest.approx(right, rel=digits, abs=0)


@pytest.mark.verifies(*SYMBOLS)
def test_one_process_is_near_torchs_own_muon_and_adamw(world):
    """Whose products are in bfloat16: two or three digits."""
    close(world(1).run(trained, Layout(), DENSE)[0], by_torch(DENSE), 0.02)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_layout_steps_as_one_process(world, layout):
    expected = world(1).run(trained, Layout(), DENSE)[0]
    for found in world(layout.gpus).run(trained, layout, DENSE):
        close(found, expected)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize(
    "layout", [Layout(data=4, expert=2, zero=n) for n in range(4)], ids=name_of
)
def test_experts_are_matrices_each(world, layout):
    expected = world(1).run(trained, Layout(), EXPERTS)[0]
    for found in world(layout.gpus).run(trained, layout, EXPERTS):
        close(found, expected)


def begun(layout, changes, directory):
    model, optimizer = made(layout, changes)
    found = steps(model, optimizer, layout, 0, 2)
    save(directory, 2, model, optimizer)
    return found


def gone_on(layout, changes, directory):
    model, optimizer = made(layout, changes | {"seed": 3})
    assert load(directory, model, optimizer)[0] == 2
    return steps(model, optimizer, layout, 2, STEPS)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout(data=2, zero=3), Layout(pipeline=2, micro_batches=2)),
        (Layout(tensor=2, data=2), Layout(data=3, zero=3)),
        (Layout(pipeline=2, tensor=2, micro_batches=2), Layout(data=2)),
        (Layout(data=4, zero=1), Layout()),
        (Layout(), Layout(data=3, zero=2, micro_batches=2)),
        (Layout(data=2, zero=2, tensor=2), Layout(data=3, zero=3)),
        (Layout(data=2, zero=3), Layout(pipeline=4, micro_batches=4)),
        (Layout(pipeline=3, micro_batches=3), Layout(data=2, pipeline=2, zero=1)),
    ],
    ids=name_of,
)
def test_its_momentum_goes_on_in_another_layout(world, tmp_path, first, second):
    expected = world(1).run(trained, Layout(), DENSE)[0]
    found = world(first.gpus).run(begun, first, DENSE, str(tmp_path))[0]
    found += world(second.gpus).run(gone_on, second, DENSE, str(tmp_path))[0]
    close(found, expected)


def gone_back(layout):
    """The last two steps again, from a state dict and weights; then a rate of 0."""
    model, optimizer = made(layout, DENSE)
    steps(model, optimizer, layout, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    found = []
    for _ in range(2):
        found.append(steps(model, optimizer, layout, 2, STEPS))
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(model, optimizer, layout, 2, 3)
    pairs = zip(model.parameters(), weights, strict=True)
    return *found, all(torch.equal(p, w) for p, w in pairs)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("zero", [0, 2])
def test_a_state_dict_reaches_both_optimizers(world, zero):
    for first, second, stayed in world(2).run(gone_back, Layout(data=2, zero=zero)):
        assert first == second and stayed


def other_optimizer(directory):
    model = wrapped(config_of(**DENSE), Layout())
    adamw = make_optimizer(model, dataclasses.replace(SPEC, kind="adamw"))
    with pytest.raises(CheckpointError):
        load(directory, model, adamw)


def test_a_checkpoint_of_muon_is_refused_by_adamw(world, tmp_path):
    world(1).run(begun, Layout(), DENSE, str(tmp_path))
    world(1).run(other_optimizer, str(tmp_path))
