"""The table of gates and the picture of sorted copies are of real runs."""

import pytest
import torch

from xtrain.expert_parallel import TopKRouter
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import moe, router

ROUTER = "xtrain.expert_parallel.router:TopKRouter"


def test_ways_to_choose_experts():
    assert router.combinations(16, 2) == 120
    assert router.combinations(64, 8) == 4_426_165_368  # DeepSeekMoE's example


@pytest.mark.verifies(ROUTER)
def test_gates_and_their_gradients_are_those_of_the_formulas(on_ranks):
    rows = router.gate_gradients().rows
    softmax, renormalised, sigmoid, both = (row[3:] for row in rows)
    assert "0" not in softmax, "a softmax over all experts reaches all logits"
    assert renormalised[2:] == both[2:] == ["0", "0"]
    assert sigmoid[1:] == ["0", "0", "0"]
    assert float(renormalised[0]) == -float(renormalised[1])
    assert [row[2] for row in rows][1::2] == ["1.000", "1.000"]


@pytest.mark.parametrize("part", ["gates", "gradient", "experts"])
def test_other_gates_stop_the_build(on_ranks, monkeypatch, part):
    from xtrain_docs.lectures.lc7.runs_router import gates_and_gradients

    found = runs.remembered(gates_and_gradients, 1)[0]
    changed = [number + 1 for number in found[1][part]]
    found[1] = {**found[1], part: changed}
    monkeypatch.setattr(runs, "remembered", lambda *_: [found])
    with pytest.raises(EvidenceError, match="softmax"):
        router.gate_gradients()


@pytest.mark.verifies(ROUTER)
def test_a_renormalised_top_1_gate_has_no_gradient():
    torch.manual_seed(0)
    x_TH = torch.randn(7, 4, dtype=torch.float64)
    for renormalize, trained in ((True, False), (False, True)):
        layer = TopKRouter(4, 3, 1, renormalize=renormalize, dtype=torch.float64)
        (layer(x_TH).gates_Tk * torch.randn(7, 1)).sum().backward()
        assert (layer.weight.grad.abs().max() > 1e-3) == trained


def test_copies_are_drawn_in_the_order_of_their_experts(on_ranks, monkeypatch):
    found = moe.told()
    drawing = moe.sorted_copies()
    assert 'viewBox="0 0 400 ' in drawing
    assert drawing.count("<title>token") == 2 * sum(found["counts"])
    wrong = {**found, "order": found["order"][::-1]}
    monkeypatch.setattr(runs, "remembered", lambda *_: [wrong])
    with pytest.raises(EvidenceError, match="in the order"):
        moe.sorted_copies()


@pytest.mark.verifies(
    "xtrain.expert_parallel.grouped:PaddedRows",
    "xtrain.expert_parallel.grouped:LoopRows",
)
def test_each_way_computes_the_rows_of_the_formula(on_ranks, monkeypatch):
    cells = [list(map(int, row[1:])) for row in moe.expert_paths().rows]
    assert cells == [[16, 64, 24, 16], [16, 64, 64, 16]]
    told = moe.told()
    monkeypatch.setattr(moe, "told", lambda: told)
    monkeypatch.setattr(runs, "remembered", lambda *_: [{"loop": 16, "padded": 32}])
    with pytest.raises(EvidenceError, match="picture"):
        moe.expert_paths()
