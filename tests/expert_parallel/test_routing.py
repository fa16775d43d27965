"""A routing's tables, the backward of the top k, and capacity, against loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.expert_parallel import reference
from xtrain.expert_parallel.routing import (
    Routing,
    count_experts,
    sort_copies,
    top_k_gradient,
    within_capacity,
)
from xtrain.plan.experts import expert_capacity

MODULE = "xtrain.expert_parallel.routing"


def routing(experts, kept, num_experts, mask=None) -> Routing:
    experts_Tk = torch.tensor(experts)
    tokens, k = experts_Tk.shape
    scores_TE = torch.full((tokens, num_experts), 1 / num_experts)
    return Routing(
        experts_Tk, torch.full((tokens, k), 1 / k), scores_TE, scores_TE.log(),
        torch.tensor(kept), None if mask is None else torch.tensor(mask),
    )  # fmt: skip


@st.composite
def tables(draw):
    """Experts of tokens, each once a token; which are kept; how many experts."""
    num_experts = draw(st.integers(1, 7))
    k, tokens = draw(st.integers(1, num_experts)), draw(st.integers(0, 6))
    order = st.permutations(range(num_experts))
    experts = [draw(order)[:k] for _ in range(tokens)]
    kept = [[draw(st.booleans()) for _ in range(k)] for _ in range(tokens)]
    experts_Tk = torch.tensor(experts, dtype=torch.int64).view(tokens, k)
    return experts_Tk, torch.tensor(kept, dtype=torch.bool).view(tokens, k), num_experts


@given(tables())
@pytest.mark.verifies(f"{MODULE}:top_k_gradient")
def test_top_k_gradient_is_that_of_autograd(table):
    experts_Tk, _, num_experts = table
    scores_TE = torch.rand(len(experts_Tk), num_experts, dtype=torch.float64)
    grad_Tk = torch.rand(experts_Tk.shape, dtype=torch.float64)
    scores_TE.requires_grad_().gather(1, experts_Tk).backward(grad_Tk)
    assert torch.equal(top_k_gradient(grad_Tk, experts_Tk, num_experts), scores_TE.grad)


@pytest.mark.verifies(f"{MODULE}:top_k_gradient")
def test_the_gradient_of_top_k_reaches_the_chosen_scores_alone():
    scores_TE = torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.3, 0.6]], requires_grad=True)
    values, experts = scores_TE.topk(2, dim=1)
    assert values.requires_grad and not experts.requires_grad
    grad_Tk = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values.backward(grad_Tk)
    expected = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0]])
    assert torch.equal(top_k_gradient(grad_Tk, experts, 3), expected)
    assert torch.equal(scores_TE.grad, expected)


@given(tables())
@pytest.mark.verifies(f"{MODULE}:sort_copies", f"{MODULE}:count_experts")
def test_kept_copies_are_sorted_by_expert_and_then_by_token(table):
    experts_Tk, kept_Tk, num_experts = table
    counts_E = count_experts(experts_Tk[kept_Tk], num_experts)
    copies = [
        (int(experts_Tk[t, j]), t, t * experts_Tk.shape[1] + j)
        for t, j in kept_Tk.nonzero().tolist()
    ]
    found = sort_copies(experts_Tk, kept_Tk, counts_E)
    assert found.tolist() == [number for _, _, number in sorted(copies)]
    assert counts_E.dtype == torch.int64
    for e in range(num_experts):
        assert counts_E[e] == sum(expert == e for expert, _, _ in copies)


@pytest.mark.verifies(f"{MODULE}:Routing")
def test_a_routing_counts_what_is_computed_and_what_is_dropped():
    kept = [[True, True], [True, False], [False, False]]
    of_all = routing([[3, 0], [3, 2], [0, 1]], kept, 5)
    assert of_all.num_experts == 5
    assert of_all.counts_E.tolist() == [1, 0, 0, 2, 0]
    assert of_all.dropped == 3
    padded = routing([[3, 0], [3, 2], [0, 1]], kept, 5, mask=[True, True, False])
    assert padded.counts_E.tolist() == [1, 0, 0, 2, 0]
    assert padded.dropped == 1, "padding is not dropped: it was never to be computed"


# ------------------------------------------------------------------------- capacity


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
    # Copies that are not wanted take no place.
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
