"""What the tests of faults train: a small model on each axis, and on several.

`select` marks the cases of the matrix that run in the scheduled workflow alone.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import ALL, AXES, EVERYDAY, Case
from tests.model.twins import config_of
from xtrain.plan import Layout
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data

MODEL = config_of(vocab_size=257, padded_vocab_size=264, num_key_value_heads=2)
EXPERTS = dataclasses.replace(
    MODEL, num_local_experts=4, num_experts_per_tok=2, intermediate_size=8
)
LAYOUTS = {
    "data": [Layout(data=2), Layout(data=2, zero=3, micro_batches=2)],
    "tensor": [Layout(tensor=2)],
    "pipeline": [Layout(pipeline=2, micro_batches=2)],
    "context": [Layout(context=2)],
    "expert": [Layout(data=2, expert=2)],
    ALL: [Layout(data=2, tensor=2, pipeline=2, context=2, expert=2, micro_batches=2)],
}
ONE_OF_EACH = [layout for axis in AXES for layout in LAYOUTS[axis]]
SEVERAL = [
    Layout(pipeline=2, data=2, tensor=2, micro_batches=2, zero=1),
    Layout(data=4, expert=2, context=2, zero=3),
]


def select(cases: Iterable[Case]) -> list[Any]:
    """The cases of every day, and the others for the scheduled workflow."""
    return [
        pytest.param(
            case, id=str(case), marks=[] if case in EVERYDAY else [pytest.mark.slow]
        )
        for case in cases
    ]


def recipe(folder: Path, layout: Layout, **changes: Any) -> Recipe:
    """Of a short text in `folder`; with experts where the layout has their axis."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {n % 7}: {n * n}" for n in range(200)))
    values: dict[str, Any] = {
        "steps": 6, "dtype": "float64", "device": "cpu", "global_batch": 8,
        "model": EXPERTS if layout.expert > 1 else MODEL,
        "data": Data(path=str(text), sequence=24),
    }  # fmt: skip
    return Recipe(layout=layout, **(values | changes))
