"""A balanced cut against all cuts there are."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from xtrain.pipeline_parallel import balanced_cut
from xtrain.schedules import SCHEDULES, simulate

CUT = "xtrain.pipeline_parallel.cut:balanced_cut"
SEARCH = "xtrain.pipeline_parallel.cut:_Search"
HOLDERS = "xtrain.schedules.action:Schedule"
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


@pytest.mark.verifies(CUT, SEARCH)
@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 9))
@example([1, 1, 1, 1, 1, 1], 4)
@example([0, 0, 0], 3)
@example([0.1] * 9, 3)
@example([10, 1, 1, 1, 1, 1, 1, 1], 4)
def test_no_cut_is_better(costs, parts):
    parts = min(parts, len(costs))
    best = min(all_cuts(len(costs), parts), key=lambda cut: key(costs, cut))
    assert balanced_cut(costs, parts) == best


def largest_rank(costs, cut, ranks):
    """What the ranks hold, the most first in what is compared."""
    sums, of_ranks = key(costs, cut), {}
    for rank, part in zip(ranks, cut, strict=True):
        cost = sum((Fraction(costs[i]) for i in part), Fraction(0))
        of_ranks[rank] = of_ranks.get(rank, 0) + cost
    return max(of_ranks.values()), sum(s * s for s in of_ranks.values()), *sums[1:]


PLACED = [("interleaved", 2), ("interleaved", 3), ("zb_v", 2), ("zb_v", 3),
          ("chimera", 4), ("chimera", 6)]  # fmt: skip


@pytest.mark.verifies(CUT, SEARCH, HOLDERS)
@pytest.mark.parametrize(("name", "ranks"), PLACED)
@given(st.lists(COST, min_size=6, max_size=9))
@example([0, 6, 6, 6, 6, 9])
@example([1] * 9)
def test_no_cut_is_better_for_ranks_with_several_parts(name, ranks, costs):
    schedule = SCHEDULES[name](ranks, 2 * ranks)
    holders, parts = schedule.holders, schedule.stages
    assert len(set(holders)) < parts
    best = min(
        all_cuts(len(costs), parts), key=lambda cut: largest_rank(costs, cut, holders)
    )
    assert balanced_cut(costs, parts, holders) == best


@pytest.mark.verifies(CUT)
@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_items_are_cut_as_if_each_part_had_a_rank(name):
    schedule = SCHEDULES[name](4, 8)
    for items in range(schedule.stages, 4 * schedule.stages):
        whole = balanced_cut([1] * items, schedule.stages)
        assert balanced_cut([1] * items, schedule.stages, schedule.holders) == whole


@pytest.mark.verifies(CUT, SEARCH)
@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipe"])
def test_a_step_is_shorter_if_ranks_are_balanced_and_not_stages(name):
    """Also of more items than the search keeps all beginnings of."""
    schedule, steps = SCHEDULES[name](4, 8), []
    for ranks in (None, schedule.holders):
        cut = balanced_cut(UNEVEN[name], schedule.stages, ranks)
        times = [sum(UNEVEN[name][i] for i in part) for part in cut]
        steps.append(simulate(schedule, times, times, times).makespan)
    assert steps[1] < 0.98 * steps[0], steps


UNEVEN = {  # embedding, layers of one or two kinds, head
    "interleaved": [0, *[1] * 4, *[2] * 14, 2],
    "zb_v": [0, *[1] * 26, 2.5],
    "dualpipe": [0, *[1] * 32, 2.4],
}


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
    with pytest.raises(ValueError, match="3 ranks of 2 parts: each part is on one"):
        balanced_cut([1, 2, 3], 2, [0, 1, 0])
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
