"""Dropout drops the same in any layout."""

import pytest
import torch

from tests.model.stage_training import even_rows
from tests.model.twins import config_of
from tests.train.layouts import ROWS, name_of
from tests.train.test_layouts import DENSE, DIGITS, EXPERTS, wrapped
from xtrain.model import XtrainModel
from xtrain.plan import Layout
from xtrain.train.steps import accumulate
from xtrain.train.wrap import wrap

STEPS = 4
SYMBOLS = (
    "xtrain.comm.batch_rows:rows_from",
    "xtrain.comm.batch_rows:micro_batches_begin",
    "xtrain.comm.batch_rows:in_micro_batch",
    "xtrain.train.steps:accumulate",
)
LAYOUTS = [
    Layout(micro_batches=4),
    Layout(data=2, micro_batches=2),
    Layout(data=2, zero=3, micro_batches=2, recompute="full"),
    Layout(tensor=2, micro_batches=2, recompute="selective"),
    Layout(data=2, tensor=2, zero=1, sequence_parallel=True),
    Layout(pipeline=2, micro_batches=4),
    Layout(pipeline=2, data=2, micro_batches=4, recompute="full", zero=2),
    Layout(pipeline=2, micro_batches=4, schedule="zb_v", chunks=2),
    Layout(pipeline=2, tensor=2, micro_batches=4, schedule="dualpipe"),
    Layout(data=3, micro_batches=2),
    Layout(context=2, micro_batches=2),
    Layout(context=2, data=2, context_way="all_gather", micro_batches=2, zero=3),
    Layout(context=2, tensor=2, context_way="ulysses", recompute="full"),
    Layout(context=3, recompute="selective", micro_batches=2),
    Layout(pipeline=2, context=2, micro_batches=4, schedule="zb_v", chunks=2),
]


def curve(layout: Layout, changes, seeded: bool = True) -> list[float]:
    model = wrapped(config_of(**changes), layout)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.03)
    found, group = [], model.data_group
    for step in range(STEPS):
        whole = even_rows(step, 0, 1)
        mine = [t.tensor_split(layout.data)[group.rank()] for t in whole]
        first = sum(
            len(part) for part in whole[0].tensor_split(layout.data)[: group.rank()]
        )
        loss = accumulate(
            model,
            *mine,
            micro_batches=layout.micro_batches,
            first_row=first,
            dropout_seed=step if seeded else None,
        )
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


DROPPING = DENSE | {"attention_dropout": 0.3}


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_masks_of_any_layout_are_those_of_one_process(world, layout):
    """Whose batch is one micro-batch; also where backward computes attention again."""
    expected = world(1).run(curve, Layout(), DROPPING)[0]
    for found in world(layout.gpus).run(curve, layout, DROPPING):
        assert found == pytest.approx(expected, rel=DIGITS, abs=0)


@pytest.mark.verifies(*SYMBOLS, "xtrain.model.overlapped_layers:forward_over")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, expert=2, micro_batches=2),
        Layout(data=2, expert=2, pipeline=2, micro_batches=4, schedule="dualpipe"),
        Layout(
            data=2, expert=2, pipeline=2, micro_batches=4, schedule="dualpipe_v",
            chunks=2, recompute="selective",
        ),
    ],
    ids=name_of,
)  # fmt: skip
def test_with_experts_the_masks_are_those_of_one_process(world, layout):
    """Also where a forward runs over a backward, layer by layer."""
    changes = EXPERTS | {"attention_dropout": 0.3}
    expected = world(1).run(curve, Layout(), changes)[0]
    for found in world(4).run(curve, layout, changes):
        assert found == pytest.approx(expected, rel=DIGITS, abs=0)


def repeated() -> tuple[list[float], list[float]]:
    """Losses of one batch in two steps, and in one step twice."""
    model = wrapped(config_of(**DROPPING), Layout())
    batch = even_rows(0, 0, 1)
    losses = [accumulate(model, *batch, dropout_seed=seed).item() for seed in (0, 1, 0)]
    first = [accumulate(model, *batch, dropout_seed=0, first_row=n) for n in (0, ROWS)]
    return losses, [loss.item() for loss in first]


@pytest.mark.verifies(*SYMBOLS)
def test_each_step_and_each_row_has_a_mask_of_its_own(world):
    losses, by_row = world(1).run(repeated)[0]
    assert losses[0] == losses[2] != losses[1]
    assert by_row[0] == losses[0] != by_row[1]
    plain = world(1).run(curve, Layout(), DENSE)[0]
    assert world(1).run(curve, Layout(), DROPPING)[0][0] != plain[0]


def test_without_a_mesh_micro_batches_have_the_masks_of_their_rows():
    losses = []
    for count in (1, 3):
        model = wrap(
            XtrainModel(config_of(**DROPPING), dtype=torch.float64), None, "none"
        )
        batch = even_rows(0, 0, 1)
        loss = accumulate(model, *batch, micro_batches=count, dropout_seed=1)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=DIGITS, abs=0)
