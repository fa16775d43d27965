"""Bytes of model state: the published tables, and the laws that hold for any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan import RECIPES, Recipe, state_memory, zero_memory

BILLION = 10**9

# ZeRO, table 1, in GB: stage 1, 2, 3 for a model of 7.5B parameters.
TABLE_1 = {
    1: ("120", "120", "120"),
    4: ("52.5", "41.3", "30"),
    16: ("35.6", "21.6", "7.5"),
    64: ("31.4", "16.6", "1.88"),
    256: ("30.4", "15.4", "0.47"),
    1024: ("30.1", "15.1", "0.12"),
}


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
@pytest.mark.parametrize("ranks", TABLE_1)
def test_table_1_of_the_zero_paper(ranks):
    for stage, printed in enumerate(TABLE_1[ranks], start=1):
        decimals = len(printed.partition(".")[2])
        found = zero_memory(7_500_000_000, ranks, stage) / 1e9
        # The paper rounds some cells and truncates others: one unit of the last digit.
        assert abs(found - float(printed)) < 10**-decimals, (stage, printed, found)


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
def test_the_papers_own_examples():
    assert zero_memory(int(1.5 * BILLION), 1, 0) == 24 * BILLION
    # The largest model whose state fits into 32 GB on 64 ranks.
    for stage, largest in ((1, 7.64), (2, 14.42), (3, 128.0)):
        assert zero_memory(int(largest * BILLION), 64, stage) <= 32.01 * BILLION
        assert zero_memory(int(largest * 1.01 * BILLION), 64, stage) > 32 * BILLION


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
@pytest.mark.parametrize("parameters", [7 * BILLION, 70 * BILLION, 405 * BILLION])
def test_sixteen_eighteen_twenty(parameters):
    assert zero_memory(parameters, 8, 0, "fp32") == 16 * parameters
    assert zero_memory(parameters, 8, 0, "zero16") == 16 * parameters
    assert zero_memory(parameters, 8, 0, "megatron18") == 18 * parameters
    assert zero_memory(parameters, 8, 0, "fp32_accum20") == 20 * parameters


def test_what_the_bytes_of_a_recipe_hold():
    """Weight, gradient, main gradient, master, moments of one parameter."""
    parts = {
        "zero16": (2, 2, 0, 4, 8),
        "megatron18": (2, 0, 4, 4, 8),  # its gradients add up in the main ones
        "fp32_accum20": (2, 2, 4, 4, 8),
        "fp32": (4, 4, 0, 0, 8),
    }
    for name, recipe in RECIPES.items():
        held = recipe.weight, recipe.gradient, recipe.main_gradient
        assert (*held, recipe.master, recipe.moments) == parts.pop(name)
        assert recipe.name == name
    assert not parts


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
def test_sharding_a_seven_billion_model_over_eight():
    """112 GB whole, never 140: an fp32 run has no second copy of its weights."""
    in_gb = [zero_memory(7 * BILLION, 8, stage) / 1e9 for stage in range(4)]
    assert in_gb == [112, 38.5, 26.25, 14]
    in_gb = [zero_memory(7 * BILLION, 8, stage, "fp32") / 1e9 for stage in range(4)]
    assert in_gb == [112, 63, 38.5, 14]


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
def test_megatrons_distributed_optimizer():
    """6 + 12/d, 8 + 8/d and 8 + 12/d bytes a parameter."""
    d, parameters = 4, 1000
    for recipe, per_parameter in (
        ("megatron18", 6 + 12 / d),
        ("fp32", 8 + 8 / d),
        ("fp32_accum20", 8 + 12 / d),
    ):
        assert zero_memory(parameters, d, 1, recipe) == per_parameter * parameters


@pytest.mark.verifies("xtrain.plan.memory:Recipe", "xtrain.plan.memory:state_memory")
def test_a_recipe_of_ones_own():
    """Weights, gradients and moments in 16, 16 and 32 bit, with no master: 8B, DP 8."""
    recipe = Recipe("no master", 2, 2, 0, 0, 8)
    parameters, gib = 15 * 2**29, 2**30  # 15 GiB of 16-bit weights
    by_stage = [state_memory(parameters, 8, stage, recipe) for stage in range(4)]
    shown = [(m.weights / gib, m.gradients / gib, m.optimizer / gib) for m in by_stage]
    assert shown == [(15, 15, 60), (15, 15, 7.5), (15, 1.875, 7.5), (1.875, 1.875, 7.5)]


@pytest.mark.verifies(
    "xtrain.plan.memory:state_memory", "xtrain.plan.memory:zero_memory"
)
@given(st.integers(0, 10**12), st.integers(1, 4096), st.sampled_from(sorted(RECIPES)))
def test_for_any_size(parameters, ranks, recipe):
    stages = [state_memory(parameters, ranks, stage, recipe) for stage in range(4)]
    totals = [memory.total for memory in stages]
    slack = RECIPES[recipe].total  # padding: less than one element of everything
    assert all(b <= a + slack for a, b in zip(totals, totals[1:], strict=False))
    assert totals[0] == parameters * RECIPES[recipe].total
    assert 0 <= totals[3] * ranks - totals[0] < ranks * slack
    assert totals == [zero_memory(parameters, ranks, s, recipe) for s in range(4)]
    if ranks == 1:
        assert len(set(totals)) == 1


@pytest.mark.verifies("xtrain.plan.memory:zero_memory")
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((10, 2, 4), "stage=4"),
        ((10, 0, 1), "ranks=0"),
        ((-1, 2, 1), "parameters=-1"),
        ((10, 2, 1, "16"), "recipe='16'.*zero16"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(ValueError, match=match):
        zero_memory(*arguments)


@pytest.mark.verifies("xtrain.plan.memory:state_memory")
def test_the_default_recipe_is_the_papers():
    for stage in range(4):
        assert state_memory(10, 2, stage) == state_memory(10, 2, stage, "zero16")
        assert state_memory(10, 2, stage) != state_memory(10, 2, stage, "fp32")
