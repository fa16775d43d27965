"""Curves of balancing: the small run collapses, and each way keeps experts busy."""

import pytest
import torch

from xtrain.expert_parallel import load_balancing_loss
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import balance, placement
from xtrain_docs.lectures.lc7.runs_training import EXPERTS


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


def losses_of_choices(tokens: int, top_k: int) -> dict[str, float]:
    """The balance loss of uniform choices and of a collapse onto the first experts."""
    uniform_TE = torch.full((tokens, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    token = torch.arange(tokens * top_k).view(tokens, top_k)
    collapsed_TE = torch.zeros_like(uniform_TE)
    collapsed_TE[:, :top_k] = 1 / top_k
    first = torch.arange(top_k).expand(tokens, top_k)
    return {
        "uniform": float(load_balancing_loss(uniform_TE, token % EXPERTS)),
        "collapsed": float(load_balancing_loss(collapsed_TE, first)),
    }


@pytest.mark.verifies("xtrain.expert_parallel.balance:load_balancing_loss")
@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_values_of_the_loss_do_not_depend_on_the_tokens(tokens):
    for top_k in (1, 2):
        found = losses_of_choices(tokens, top_k)
        assert found["uniform"] == pytest.approx(1, abs=1e-12)
        assert found["collapsed"] == pytest.approx(EXPERTS / top_k, abs=1e-12)


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
