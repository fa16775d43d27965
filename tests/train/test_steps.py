"""Steps with fewer rows than micro-batches, and with some layers recomputed."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.model.stage_training import even_rows
from tests.model.twins import close, config_of
from tests.train.layouts import name_of
from tests.train.test_layouts import DENSE, EXPERTS, wrapped
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.train.steps import accumulate

ACCUMULATE = "xtrain.train.steps:accumulate"
ROWS = 3
"""Of all ranks; the last has fewer than the others, or none."""


def few_rows(step: int, layout: Layout):
    """This many of a batch of eight, and of them those of each data rank."""
    return [t[:ROWS].tensor_split(layout.data) for t in even_rows(step, 0, 1)]


def with_empty_ones(layout: Layout, changes, losses, gradients) -> None:
    model = wrapped(config_of(**changes), layout)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.03)
    for step, (right, of_weights) in enumerate(zip(losses, gradients, strict=True)):
        here = model.data_group.rank()
        tokens, labels = (parts[here] for parts in few_rows(step, layout))
        assert len(tokens) < layout.micro_batches
        loss = accumulate(model, tokens, labels, micro_batches=layout.micro_batches)
        close(loss, right, step)
        if model.kind in ("none", "ddp"):
            for name, weight in model.named_parameters():
                place = model.placement(name)
                close(weight.grad, place.of(of_weights[name]), name)
        optimizer.step()
        optimizer.zero_grad()


def one_process(changes, steps: int = 3, rows: int = ROWS):
    """Losses and gradients of steps on the same rows, whole."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    losses, gradients = [], []
    for step in range(steps):
        loss = model.loss(*(t[:rows] for t in even_rows(step, 0, 1)))
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.mark.verifies(ACCUMULATE)
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(micro_batches=5), DENSE),
        (Layout(micro_batches=5), EXPERTS),
        (Layout(data=2, micro_batches=4), DENSE),
        (Layout(data=2, zero=3, micro_batches=4), DENSE),
        (Layout(data=4, zero=3, micro_batches=2), DENSE),
        (Layout(data=4, zero=2, micro_batches=2), DENSE),
        (Layout(data=4, expert=2, micro_batches=2), EXPERTS),
        (Layout(context=2, tensor=2, micro_batches=4), DENSE),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Layout) else "",
)
def test_empty_micro_batches_of_one_model_weigh_nothing(world, layout, changes):
    """On four data ranks the last has no row at all."""
    world(layout.gpus).run(with_empty_ones, layout, changes, *one_process(changes))


def too_few(layout: Layout) -> str:
    model = wrapped(config_of(**DENSE), layout)
    here = model.data_group.rank()
    rows = [parts[here] for parts in few_rows(0, layout)]
    with pytest.raises(ValueError, match=r"have \d rows, fewer than the 4") as caught:
        accumulate(model, *rows)
    assert all(p.grad is None for p in model.parameters())
    assert accumulate(model, *even_rows(0, 0, 1)).isfinite()
    return str(caught.value)


@pytest.mark.verifies(ACCUMULATE)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, micro_batches=4),
        Layout(pipeline=2, data=2, zero=3, micro_batches=4),
    ],
    ids=name_of,
)
def test_stages_have_a_row_for_each_micro_batch_or_refuse_on_every_rank(world, layout):
    assert len(set(world(layout.gpus).run(too_few, layout))) == 1


def recomputing(layout: Layout, losses, gradients) -> None:
    """Which layers of this rank run twice for each micro-batch."""
    model = wrapped(config_of(**DENSE), layout)
    model.optimizer(torch.optim.SGD, lr=0.03)
    layers = [layer for part in model.parts for layer in part.layers]
    calls = [0] * len(layers)
    for place, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(partial(counted, calls, place))
    here = model.data_group.rank()
    batch = [t.tensor_split(layout.data)[here] for t in even_rows(0, 0, 1)]
    loss = accumulate(model, *batch, micro_batches=layout.micro_batches)
    close(loss, losses[0])
    for name, weight in model.named_parameters():
        if model.kind in ("none", "ddp"):
            close(weight.grad, model.placement(name).of(gradients[0][name]), name)
    some = min(layout.recomputed_layers, len(layers))
    count = layout.micro_batches
    if layout.schedule == "dualpipe":  # half of them go through each of its stages
        count //= 2
    assert calls == [2 * count] * some + [count] * (len(layers) - some)


def counted(calls: list[int], place: int, *_) -> None:
    calls[place] += 1


@pytest.mark.verifies(
    "xtrain.model.stages:make_modules", "xtrain.model.decoder_parts:DecoderParts"
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(recomputed_layers=3, micro_batches=2),
        Layout(data=2, zero=3, recomputed_layers=1),
        Layout(tensor=2, context=2, recomputed_layers=2),
        Layout(pipeline=2, micro_batches=2, recomputed_layers=1),
        Layout(pipeline=2, micro_batches=2, schedule="zb_v", chunks=2,
               recomputed_layers=1),
        Layout(pipeline=2, micro_batches=4, schedule="dualpipe", recomputed_layers=3),
        Layout(pipeline=2, data=2, micro_batches=4, recomputed_layers=9),
    ],
    ids=lambda layout: f"{name_of(layout)}-{layout.recomputed_layers}",
)  # fmt: skip
def test_only_so_many_layers_of_a_rank_are_recomputed(world, layout):
    layout = replace(layout, recompute="full")
    world(layout.gpus).run(recomputing, layout, *one_process(DENSE, 1, 8))
