"""Capacity: which copies find room, against a loop over choices and tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.expert_parallel import reference
from tests.expert_parallel.test_routing import tables
from xtrain.expert_parallel.capacity import within_capacity
from xtrain.plan.experts import expert_capacity

MODULE = "xtrain.expert_parallel.capacity"


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "capacity"),
    [(32, 4, 2, 1.0, 16), (32, 4, 2, 2.0, 32), (10, 4, 1, 1.25, 4), (7, 3, 2, 1.0, 5),
     (0, 4, 2, 1.0, 0), (1, 64, 1, 1.0, 1), (100, 8, 1, 0.5, 7)],
)  # fmt: skip
@pytest.mark.verifies("xtrain.plan.experts:expert_capacity")
def test_capacity_is_rounded_up(tokens, experts, top_k, factor, capacity):
    assert expert_capacity(tokens, experts, top_k, factor) == capacity


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.verifies("xtrain.plan.experts:expert_capacity")
def test_a_factor_that_is_no_number_above_zero_is_refused(factor):
    with pytest.raises(ValueError, match="capacity_factor="):
        expert_capacity(8, 4, 2, factor)


@given(tables(), st.integers(0, 7))
@pytest.mark.verifies(f"{MODULE}:within_capacity")
def test_first_choices_of_all_tokens_find_room_before_second_ones(table, capacity):
    experts_Tk, wanted_Tk, num_experts = table
    kept = within_capacity(experts_Tk, num_experts, capacity)
    expected = reference.within(experts_Tk.tolist(), num_experts, capacity)
    assert kept.tolist() == expected
    assert kept.dtype == torch.bool and kept.shape == experts_Tk.shape
    for e in range(num_experts):
        asked = int((experts_Tk == e).sum())
        assert int((experts_Tk[kept] == e).sum()) == min(asked, capacity)
    # Copies that are not wanted take nobody's place.
    kept = within_capacity(experts_Tk, num_experts, capacity, wanted_Tk)
    assert not (kept & ~wanted_Tk).any()
    for e in range(num_experts):
        asked = int((experts_Tk[wanted_Tk] == e).sum())
        assert int((experts_Tk[kept] == e).sum()) == min(asked, capacity)


@pytest.mark.verifies(f"{MODULE}:within_capacity")
def test_ties_go_to_the_earlier_choice_and_then_to_the_earlier_token():
    """Everything to expert 0 or 1, room for two each: all scores are tied."""
    experts_Tk = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    kept = within_capacity(experts_Tk, 2, 2)
    #  first choices: 1 0 0 0 -> the third 0 finds no room; then 0 (full), 1, 1, 1
    assert kept.tolist() == [[True, False], [True, True], [True, False], [False, False]]
    wanted = torch.tensor([[True] * 2, [False] * 2, [True] * 2, [True] * 2])
    kept = within_capacity(experts_Tk, 2, 2, wanted)
    assert kept.tolist() == [[True, False], [False] * 2, [True, True], [True, False]]
