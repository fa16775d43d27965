"""What the pages of lc7 draw and count."""

import json

import pytest

from xtrain_docs.lectures.lc7 import (
    balance,
    expert_parallel,
    model,
    moe,
    overlap,
    placement,
)

# one device ---------------------------------------------------------------------------


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


# overlap ------------------------------------------------------------------------------


def test_messages_lie_under_compute_only_where_micro_batches_overlap(on_ranks):
    for kind, drawing in (
        ("pair", overlap.overlapped_block()),
        ("prefill", overlap.prefill_turns()),
    ):
        alone, together = (overlap.recorded(kind, how) for how in (False, True))
        assert len(alone["events"]) == len(together["events"])
        assert overlap.clock(kind, False) == alone["total"]
        for found, hidden in ((alone, False), (together, True)):
            kinds = [
                kind for _, chunk, kind, *_ in found["events"] if chunk != "counts"
            ]
            pairs = list(zip(kinds, kinds[1:], strict=False))
            assert (("issue", "compute") in pairs) == hidden
        computed = [e for e in together["events"] if e[2] == "compute"]
        boxes = [f"<title>{batch} {chunk}: " for batch, chunk, *_ in computed]
        assert all(drawing.count(box) >= 2 * boxes.count(box) for box in boxes)
        assert "Download both as a trace" in drawing


def test_the_trace_has_every_chunk_and_message(on_ranks):
    found = {"alone": overlap.recorded("pair", False)}
    events = json.loads(overlap.chrome_events(found))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    kinds = [kind for _, _, kind, *_ in found["alone"]["events"]]
    for lane, kind in enumerate(overlap.LANES):
        ours = [event for event in slices if event["tid"] == lane]
        assert len(ours) == kinds.count(kind) > 0


# expert ranks and the whole model -----------------------------------------------------


@pytest.mark.verifies(
    "xtrain.expert_parallel.dispatch:dispatch",
    "xtrain.expert_parallel.dispatch:combine",
)
def test_tokens_go_to_their_experts_and_two_outputs_come_back(on_ranks):
    out = expert_parallel.expert_dispatch().data
    back = expert_parallel.expert_combine().data
    sent, returned = (data["steps"][0] for data in (out, back))
    copies = {
        (token // 2, expert, token)
        for token, chosen in enumerate(expert_parallel.CHOICES)
        for expert in chosen
        if expert != token // 2
    }
    assert copies == {
        (m["src"], m["dst"], t) for m in sent["messages"] for t in m["cells"]
    }
    assert copies == {
        (m["dst"], m["src"], t) for m in returned["messages"] for t in m["cells"]
    }
    for token, chosen in enumerate(expert_parallel.CHOICES):
        home = [state[token] for state in sent["state"]]
        assert [bool(cell) for cell in home] == [r in chosen for r in range(4)]
        assert returned["state"][token // 2][token] == sorted(chosen)


@pytest.mark.verifies(
    "xtrain.model.parameters:is_summed_over", "xtrain.model.parameters:placement_of"
)
def test_who_holds_and_sums_what():
    router, down = "mlp.router.weight", "mlp.experts.down_proj"
    assert model.shape_of(router) == model.shape_of(router, 2, 2) == "8 × 16"
    assert model.summed_over(router) == "`expert_data`, `expert`"
    assert model.shape_of(down) == "8 × 16 × 24"
    assert model.shape_of(down, 2, 2) == "4 × 16 × 12"
    assert model.summed_over(down) == "`expert_data`"
    assert model.expert_model_shares().count("<title>expert") == 3 * 2
