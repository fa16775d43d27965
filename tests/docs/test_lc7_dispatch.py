"""Dispatch and combine as the pages show them: recorded, counted, held to formulas."""

import copy

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc7 import dispatch, dispatch_bytes, expert_groups, model

DISPATCH = (
    "xtrain.expert_parallel.dispatch:dispatch",
    "xtrain.expert_parallel.dispatch:combine",
)


@pytest.mark.verifies(*DISPATCH)
def test_tokens_go_to_their_experts_and_two_outputs_come_back(on_ranks):
    out, back = dispatch.expert_dispatch().data, dispatch.expert_combine().data
    sent, returned = (data["steps"][0]["messages"] for data in (out, back))
    assert {(m["src"], m["dst"], *m["cells"]) for m in sent} == {
        (m["dst"], m["src"], *m["cells"]) for m in returned
    }
    home = back["steps"][0]["state"]
    parts = [home[token // 2][token] for token in range(8)]
    assert all(len(content) == 2 for content in parts)


@pytest.mark.parametrize("phase", dispatch.PHASES)
def test_other_messages_stop_the_build(on_ranks, monkeypatch, phase):
    found = copy.deepcopy(dispatch.told())
    found[2][phase]["0"] = [7]
    monkeypatch.setattr(runs, "remembered", lambda *_: found)
    with pytest.raises(EvidenceError, match=f"rank 2, {phase}"):
        dispatch.expert_dispatch()


@pytest.mark.parametrize("end", ["rows", "output"])
def test_other_ends_stop_the_build(on_ranks, monkeypatch, end):
    found = copy.deepcopy(dispatch.told())
    found[1][end] = found[1][end][::-1]
    monkeypatch.setattr(runs, "remembered", lambda *_: found)
    with pytest.raises(EvidenceError, match=r"expert 1 has|rank 1 ends"):
        dispatch.expert_combine()


@pytest.mark.verifies(*DISPATCH, "xtrain.expert_parallel.dispatch:plan_dispatch")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_all_to_all_sends_the_copies_of_the_routing(on_ranks, monkeypatch, ranks):
    for uniform in (False, True):
        found = copy.deepcopy(dispatch_bytes.counted(ranks, uniform))
        assert [one["counts"] for one in found] == [
            8 * (ranks - 1) * 8 // ranks
        ] * ranks
    assert len(dispatch_bytes.expert_bytes(ranks).rows) == ranks
    assert len(dispatch_bytes.expert_bytes_uniform((ranks,)).rows) == 1
    found[0]["combine"] += 48
    monkeypatch.setattr(runs, "remembered", lambda *_: found)
    with pytest.raises(EvidenceError, match="rank 0 of"):
        dispatch_bytes.expert_bytes(ranks)


@pytest.mark.verifies("xtrain.expert_parallel.gshard:GShardMoE")
def test_gradients_of_experts_are_sums_already(on_ranks, monkeypatch):
    rows = expert_groups.expert_gradient_scale((2,)).rows
    assert [row[1] for row in rows][::3] == ["none", "none"]
    assert rows[1][1] == "0.5"
    keys = ("experts", "experts, averaged", "router", "router, summed")
    wrong = dict.fromkeys(keys, 0.1)
    monkeypatch.setattr(runs, "remembered", lambda *_: [wrong])
    with pytest.raises(EvidenceError, match="experts, 2 ranks"):
        expert_groups.expert_gradient_scale((2,))


def test_columns_of_the_mesh_hold_the_same_experts(on_ranks, monkeypatch):
    found = []
    remembered = runs.remembered

    def keep(*arguments):
        found[:] = remembered(*arguments)
        return found

    monkeypatch.setattr(runs, "remembered", keep)
    assert expert_groups.expert_groups(2, 4).count("<title>rank") == 4
    other = copy.deepcopy(found)
    other[3]["experts"] = [0, 1, 2, 3]
    with pytest.raises(EvidenceError, match="rank 1"):
        expert_groups.check_groups(other, 2, 4)


@pytest.mark.verifies(
    "xtrain.model.placement:is_summed_over", "xtrain.model.placement:placement_of"
)
def test_who_holds_and_sums_what(on_ranks, monkeypatch):
    rows = {row[0]: row[1:] for row in model.expert_sums().rows}
    assert rows["router"] == ["8 × 16", "8 × 16", "`expert_data`, `expert`"]
    assert rows["experts, down"] == ["8 × 16 × 24", "4 × 16 × 12", "`expert_data`"]
    drawing = model.expert_model_shares()
    assert drawing.count("<title>expert") == 3 * 2
    found = copy.deepcopy(model.parameters_of("expert 2"))
    found[0]["layers.0.mlp.experts.gate_proj"]["shape"] = [8, 24, 16]
    monkeypatch.setattr(
        runs, "remembered", lambda *_: [{"parameters": one} for one in found]
    )
    with pytest.raises(EvidenceError, match="gate_proj"):
        model.parameters_of("expert 2")
