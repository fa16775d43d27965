"""A dry run of 70B parameters on 1,024 ranks."""

import pytest

from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.train.dry_run import dry_run
from xtrain.train.dry_run_table import planned, text
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data

MODEL = XtrainConfig(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256,
)  # fmt: skip


@pytest.mark.slow
def test_seventy_billion_parameters_on_1024_ranks():
    """Under three minutes of processor."""
    layout = Layout(
        pipeline=8, data=16, tensor=8, sequence_parallel=True, zero=1,
        micro_batches=16, recompute="selective",
    )  # fmt: skip
    recipe = Recipe(
        dtype="bfloat16", model=MODEL, layout=layout, data=Data(sequence=4096),
        global_batch=256,
    )  # fmt: skip
    found = dry_run(recipe, 1024)
    assert found.processor < 180 and len(found.executed) == 8
    assert 0.5 < found.seconds / planned(found).fitted.seconds < 1
    assert "70.6e9 parameters on 1024 ranks" in text(found)
