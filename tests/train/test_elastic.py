"""A run on fewer and on more ranks than its layout's: the layout, and the curve."""

import re
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from tests.train.test_run import close, curve, recipe, text  # noqa: F401
from xtrain.plan import Layout
from xtrain.train.elastic import fitted
from xtrain.train.rates import Rate
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Checkpoint
from xtrain.train.recipes import dense_bytes, tiny_experts
from xtrain.train.run import train

FITTED = "xtrain.train.elastic:fitted"


def elastic(layout: Layout, base: Any = dense_bytes, batch: int | None = 24) -> Recipe:
    return replace(base(), layout=layout, global_batch=batch, elastic=True)


@pytest.mark.verifies(FITTED)
@pytest.mark.parametrize(
    ("layout", "world", "expected"),
    [
        (Layout(data=4), 2, {"data": 2, "micro_batches": 2}),
        (Layout(data=4, micro_batches=2), 3, {"data": 3, "micro_batches": 3}),
        (Layout(data=4, micro_batches=6), 5, {"data": 5, "micro_batches": 4}),
        (Layout(data=2, micro_batches=2), 4, {"data": 4, "micro_batches": 1}),
        (Layout(data=4, tensor=2), 2, {"data": 1, "micro_batches": 4}),
        (Layout(data=4, pipeline=2, micro_batches=4), 4,
         {"data": 2, "micro_batches": 6}),
        (Layout(data=4, pipeline=2, micro_batches=6), 6,
         {"data": 3, "micro_batches": 8}),
        (Layout(data=8, zero=3, replicate=4), 6,
         {"data": 6, "micro_batches": 2, "replicate": 3}),
    ],
)  # fmt: skip
def test_micro_batches_grow_in_number_and_the_global_batch_stays(
    layout, world, expected
):
    found = fitted(elastic(layout), world)
    assert found.layout == replace(layout, **expected) and found.batch == 24
    assert fitted(found, layout.gpus).layout.data == layout.data
    least = elastic(replace(layout, micro_batch=2), batch=None)
    assert fitted(least, world).batch == least.batch
    assert fitted(elastic(layout), layout.gpus) == elastic(layout)
    rigid = replace(elastic(layout), elastic=False)
    assert fitted(rigid, world) == rigid


@pytest.mark.verifies(FITTED)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("world", range(1, 13))
def test_a_micro_batch_takes_the_memory_that_it_took(world, micro_batches):
    layout = Layout(data=4, micro_batches=micro_batches)
    found = fitted(elastic(layout), world)
    rows = ceil(ceil(24 / found.layout.data) / found.layout.micro_batches)
    assert rows <= max(2, 6 // micro_batches)


@pytest.mark.verifies(FITTED)
@pytest.mark.parametrize(
    ("layout", "world", "told"),
    [
        (Layout(data=2, tensor=2), 3, "3 ranks are no multiple of pipeline 1 x contex"),
        (Layout(data=8, expert=4), 6, "expert=4 does not divide the 6 data ranks of 6"),
        (Layout(data=2), 25, "global_batch=24 has not one sequence for each of the 25"),
        (Layout(data=4, zero=3, replicate=2), 3, "replicate"),
    ],
)
def test_ranks_that_do_not_fit_are_told(layout, world, told):
    base = tiny_experts if layout.expert > 1 else dense_bytes
    with pytest.raises(ValueError, match=re.escape(told)):
        fitted(elastic(layout, base), world)


LAYOUTS = [
    (Layout(data=4, zero=1, micro_batches=2), 3),
    (Layout(data=2, zero=3), 3),
    (Layout(data=2, tensor=2), 2),
    (Layout(data=2, pipeline=2, micro_batches=2), 2),
]


@pytest.mark.verifies(FITTED, "xtrain.train.run:TrainingRun")
@pytest.mark.parametrize(("layout", "fewer"), LAYOUTS, ids=str)
def test_the_curve_of_one_process_on_fewer_ranks_and_again_on_more(
    world, text, tmp_path, layout, fewer  # noqa: F811
):  # fmt: skip
    same = {"rate": Rate(kind="constant")}
    expected = curve(recipe(text, steps=6, **same))
    kept = Checkpoint(folder=str(tmp_path), every=2)
    losses, norms = [], []
    for ranks, steps in ((layout.gpus, 2), (fewer, 4), (layout.gpus, 6)):
        made = recipe(
            text, steps=steps, layout=layout, elastic=True, checkpoint=kept, **same
        )
        for found in world(ranks).run(curve, made):
            assert len(found[0]) == 2
        losses += found[0]
        norms += found[1]
    assert close(losses, expected[0]) and close(norms, expected[1])


def refused(made: Recipe) -> str:
    try:
        train(made)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.verifies(FITTED)
def test_every_rank_tells_what_does_not_fit(world, text):  # noqa: F811
    made = recipe(text, layout=Layout(data=2, tensor=2), elastic=True)
    for told in world(3).run(refused, made):
        assert "3 ranks are no multiple of" in told
