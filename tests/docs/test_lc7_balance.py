"""One device: the small run collapses, each way keeps experts busy; plans."""

import pytest

from xtrain_docs.lectures.lc7 import balance, moe, placement


@pytest.mark.verifies(
    "xtrain.expert_parallel.moe:MoE",
    "xtrain.expert_parallel.balance:load_balancing_loss",
    "xtrain.expert_parallel.balance:update_balance_bias",
)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_router_collapses_and_balancing_prevents_it(on_ranks, seed):
    """With top 1: more than half of all for one expert, or at most twice the mean."""
    found = {way: balance.busiest_over_mean(way, 1, seed) for way in balance.WAYS}
    assert found["none"] > 4
    assert max(found["loss"], found["bias"]) < 2
    losses = {way: balance.late_loss(way, seed) for way in found}
    assert max(losses["loss"], losses["bias"]) < losses["none"]


def test_pictures_of_the_runs(on_ranks):
    assert balance.expert_loads().count("<title>expert 0, step 0: ") == 3
    both = balance.routing_map("none+bias")
    assert both.count(": gate 0.00") == 2 * 26 * (8 - 2)
    assert balance.busiest_at(149, "none") > 2 * balance.busiest_at(149, "bias")
    shares = [balance.dropped_share("none", slots) for slots in (32, 64, 256)]
    assert shares == sorted(shares, reverse=True) and shares[-1] == 0


@pytest.mark.verifies("xtrain.expert_parallel.expert_placement:plan_placement")
def test_replicas_make_the_ranks_equal(on_ranks):
    slow = [placement.slowdown("none", slots) for slots in placement.SLOTS]
    assert slow == sorted(slow, reverse=True)
    assert slow[1] > 1.9 > 1.1 > slow[2], "one expert alone is above the mean"
    drawing = placement.expert_placements()
    assert drawing.count("<title>rank") == 8 + 8 + 12 + 16


def test_copies_are_drawn_in_the_order_of_their_experts(on_ranks):
    found = moe.sorted_batch()
    assert found["order"] == sorted(range(16), key=lambda c: found["experts"][c])
    assert moe.rows_of_picture() == [found["experts"].count(e) for e in range(4)]
    assert moe.sorted_copies().count("<title>token") == 2 * 16


def test_ways_to_choose_experts():
    assert moe.combinations(16, 2) == 120
    assert moe.combinations(64, 8) == 4_426_165_368  # DeepSeekMoE's example
