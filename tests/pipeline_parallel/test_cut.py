"""A balanced cut against all cuts there are."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from xtrain.pipeline_parallel import balanced_cut

CUT = "xtrain.pipeline_parallel.cut:balanced_cut"
COST = st.one_of(
    st.integers(0, 20), st.floats(0, 1e6), st.sampled_from([0, 0.1, 0.2, 0.3, 1])
)


def all_cuts(items: int, parts: int):
    for inner in itertools.combinations(range(1, items), parts - 1):
        ends = (0, *inner, items)
        yield [range(a, b) for a, b in itertools.pairwise(ends)]


def key(costs, cut):
    """What is compared: the largest part, the squares, and where the parts end."""
    sums = [sum((Fraction(costs[i]) for i in part), Fraction(0)) for part in cut]
    return max(sums), sum(s * s for s in sums), [part.stop for part in cut]


@pytest.mark.verifies(CUT)
@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 9))
@example([1, 1, 1, 1, 1, 1], 4)
@example([0, 0, 0], 3)
@example([0.1] * 9, 3)
@example([10, 1, 1, 1, 1, 1, 1, 1], 4)
def test_no_cut_is_better(costs, parts):
    parts = min(parts, len(costs))
    best = min(all_cuts(len(costs), parts), key=lambda cut: key(costs, cut))
    assert balanced_cut(costs, parts) == best


@pytest.mark.verifies(CUT)
@given(st.lists(COST, min_size=1, max_size=40), st.integers(1, 40))
def test_every_item_is_in_one_part_and_each_part_has_one(costs, parts):
    parts = min(parts, len(costs))
    cut = balanced_cut(costs, parts)
    assert [item for part in cut for item in part] == list(range(len(costs)))
    assert len(cut) == parts and all(cut)


@pytest.mark.verifies(CUT)
def test_what_cannot_be_cut_is_refused_with_the_rule():
    with pytest.raises(ValueError, match="2 items cannot be cut into 3 parts: .* one "):
        balanced_cut([1, 2], 3)
    with pytest.raises(ValueError, match="2 items cannot be cut into 0 parts"):
        balanced_cut([1, 2], 0)
    with pytest.raises(ValueError, match="0 items cannot be cut into 1 part"):
        balanced_cut([], 1)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"item 1 costs {wrong}: .* at least 0"):
            balanced_cut([1, wrong], 1)


@pytest.mark.verifies(CUT)
def test_parts_of_a_sequential_are_the_model_without_a_copy():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 30))
    costs = [layer.weight.numel() for layer in model]
    cut = balanced_cut(costs, 3)
    stages = [model[part.start : part.stop] for part in cut]
    x = torch.randn(2, 4)
    assert torch.equal(stages[2](stages[1](stages[0](x))), model(x))
    assert [p for s in stages for p in s.parameters()] == list(model.parameters())
    assert [len(part) for part in cut] == [2, 3, 1]
