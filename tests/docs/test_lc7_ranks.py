"""Expert ranks and the whole model, as the pages show them."""

import pytest

from xtrain_docs.lectures.lc7 import expert_parallel, model


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
