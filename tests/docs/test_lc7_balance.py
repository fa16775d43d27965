"""Curves of balancing: the small run collapses, and each way keeps experts busy."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import balance, placement


@pytest.mark.verifies(
    "xtrain.expert_parallel.moe:MoE",
    "xtrain.expert_parallel.balance:load_balancing_loss",
    "xtrain.expert_parallel.balance:update_balance_bias",
)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_router_collapses_and_balancing_prevents_it(on_ranks, seed):
    """With top 1: more than half of all for one expert, or at most twice the mean."""
    found = {way: balance.late(way, 1, seed) for way in balance.NAMES}
    assert found["none"] > 4
    assert max(found["loss"], found["bias"]) < 2
    losses = {way: sum(balance.told(way, 1, seed)["losses"][-10:]) for way in found}
    assert max(losses["loss"], losses["bias"]) < losses["none"]


@pytest.mark.verifies("xtrain.expert_parallel.balance:load_balancing_loss")
def test_values_of_the_loss_do_not_depend_on_the_tokens(on_ranks, monkeypatch):
    rows = balance.balance_loss_values().rows
    assert [row[2] for row in rows] == ["1"] * 6
    assert [row[3] for row in rows] == ["8", "4"] * 3
    monkeypatch.setattr(
        runs, "remembered", lambda *_: [{"uniform": 2.0, "collapsed": 8.0}]
    )
    with pytest.raises(EvidenceError, match="8 tokens"):
        balance.balance_loss_values()


@pytest.mark.verifies("xtrain.expert_parallel.capacity:within_capacity")
def test_a_balanced_layer_drops_less(on_ranks):
    rows = balance.capacity_drops().rows
    dropped = [[int(cell.split()[0]) for cell in row[2:4]] for row in rows]
    assert all(bias < none for none, bias in dropped)
    assert dropped == sorted(dropped, reverse=True)
    assert [row[1] for row in rows] == ["32", "40", "48", "64", "128"]


def test_pictures_of_the_runs(on_ranks, monkeypatch):
    told = {way: balance.told(way) for way in balance.NAMES}
    for drawing in (balance.busiest_expert(), balance.expert_loads()):
        assert 'viewBox="0 0 400 ' in drawing
        assert "min-width:0" in drawing
    map_of_both = balance.routing_map("none+bias")
    assert map_of_both.count(": gate 0.00") == 2 * 26 * (8 - 2)
    assert len(balance.balance_by_way().rows) == 3
    lost = {"loads": [[1] * 8], "losses": [0.0]}
    monkeypatch.setattr(runs, "remembered", lambda *_: [lost])
    with pytest.raises(EvidenceError, match="copies in"):
        balance.busiest_expert()
    monkeypatch.setattr(runs, "remembered", lambda *_: [[[0.7] + [0.0] * 7]])
    with pytest.raises(EvidenceError, match="token 0"):
        balance.routing_map()
    assert told["none"]["loads"] != told["bias"]["loads"]


@pytest.mark.verifies("xtrain.expert_parallel.placement:plan_placement")
def test_replicas_make_the_ranks_equal(on_ranks, monkeypatch):
    plans = placement.told("none")
    slow = [plan["slowdown"] for plan in plans]
    assert slow == sorted(slow, reverse=True)
    assert slow[1] > 1.9 > 1.1 > slow[2], "one expert alone is above the mean"
    assert len(placement.placement_slowdowns().rows) == 4
    drawing = placement.expert_placements()
    assert drawing.count("<title>rank") == 8 + 8 + 12 + 16
    plans[0]["slowdown"] += 0.1
    monkeypatch.setattr(runs, "remembered", lambda *_: [plans])
    with pytest.raises(EvidenceError, match="slowdown"):
        placement.expert_placements()
