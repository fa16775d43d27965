"""A routing's tables, and the backward of taking the top k."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.expert_parallel.routing import (
    Routing,
    count_experts,
    sort_copies,
    top_k_gradient,
)

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
