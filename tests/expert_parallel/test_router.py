"""TopKRouter against a loop over tokens: choices, gates, scores and their gradients."""

import copy

import pytest
import torch

from tests.expert_parallel import reference
from tests.expert_parallel.reference import Rules
from xtrain.expert_parallel import TopKRouter
from xtrain.expert_parallel.router import check_router, check_tokens, keep_best_groups

MODULE = "xtrain.expert_parallel.router"
ROUTER = f"{MODULE}:TopKRouter"
STATS = f"{MODULE}:RouterStats"
HIDDEN, EXPERTS, TOKENS = 6, 8, 13

CASES = {
    "Mixtral's": Rules(2),
    "one expert": Rules(1),
    "one expert, its score": Rules(1, renormalize=False),
    "all experts": Rules(8),
    "not renormalised": Rules(3, renormalize=False),
    "sigmoid": Rules(3, "sigmoid"),
    "sigmoid, not renormalised": Rules(3, "sigmoid", renormalize=False),
    "scaled": Rules(2, "sigmoid", scale=2.5),
    "groups": Rules(4, "sigmoid", groups=4, top_groups=2),
    "one group": Rules(2, groups=4, top_groups=1),
    "groups of softmax, judged by one": Rules(2, groups=4, top_groups=2),
    "more groups than experts wanted": Rules(1, groups=4, top_groups=2),
    "all groups": Rules(3, groups=4, top_groups=4),
    "tight": Rules(2, capacity_factor=0.5),
    "exact": Rules(3, capacity_factor=1.0),
    "roomy": Rules(2, capacity_factor=8.0),
    "all at once": Rules(
        4, "sigmoid", True, 1.5, groups=4, top_groups=2, capacity_factor=0.75
    ),
}


def router_of(rules: Rules, weight: torch.Tensor, **options) -> TopKRouter:
    made = {"dtype": weight.dtype, **rules.__dict__, **options}
    router = TopKRouter(weight.shape[1], weight.shape[0], made.pop("top_k"), **made)
    with torch.no_grad():
        router.weight.copy_(weight)
    return router


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.verifies(ROUTER, STATS, f"{MODULE}:keep_best_groups")
def test_a_router_chooses_as_the_loop_over_tokens_does(case, biased, masked):
    rules = CASES[case]
    made = reference.weights(EXPERTS, HIDDEN, 2)
    x = reference.tokens(TOKENS, HIDDEN).requires_grad_()
    weight = made["router"].clone().requires_grad_()
    bias = reference.tokens(1, EXPERTS, seed=3)[0] / 4 if biased else None
    mask = torch.arange(TOKENS) % 4 != 2 if masked else None
    router = router_of(rules, made["router"], balance_bias=biased).double()
    if biased:
        router.balance_bias.copy_(bias)
    expected = reference.dense_moe(
        x, weight, made["gate"], made["up"], made["down"], rules,
        bias_E=bias, mask_T=mask,
    )  # fmt: skip
    mine = x.detach().clone().requires_grad_()
    found = router(mine, mask)

    real = range(TOKENS) if mask is None else mask.nonzero().flatten().tolist()
    assert [found.experts_Tk[t].tolist() for t in real] == [
        expected.chosen[t] for t in real
    ]
    close(found.logits_TE, expected.logits_TE)
    close(found.probabilities_TE, expected.probabilities_TE)
    kept = [found.kept_Tk[t].tolist() for t in real]
    assert kept == [expected.kept[t] for t in real]
    assert found.counts_E.tolist() == expected.counts
    if masked:
        assert not found.kept_Tk[~mask].any(), "padding goes nowhere"
    stats = router.stats
    assert stats.tokens == len(real)
    assert stats.counts_E.tolist() == expected.counts
    assert stats.dropped == len(real) * rules.top_k - sum(expected.counts)
    close(stats.load_balancing_loss, expected.load_balancing_loss)
    close(stats.z_loss, expected.z_loss)

    gates = torch.stack([torch.stack(expected.gates[t]) for t in real])
    close(found.gates_Tk[list(real)], gates)
    towards = reference.tokens(len(real), rules.top_k, seed=9)
    (gates * towards).sum().backward()
    (found.gates_Tk[list(real)] * towards).sum().backward()
    close(mine.grad, x.grad)
    close(router.weight.grad, weight.grad)


@pytest.mark.verifies(ROUTER)
def test_the_bias_changes_the_choice_and_never_the_gates():
    made = reference.weights(EXPERTS, HIDDEN, 2)
    x = reference.tokens(TOKENS, HIDDEN)
    router = router_of(Rules(2, "sigmoid"), made["router"], balance_bias=True).double()
    before = router(x)
    router.balance_bias[5] = 100.0
    after = router(x)
    assert (after.experts_Tk[:, 0] == 5).all()
    assert not (before.experts_Tk[:, 0] == 5).all()
    chosen = after.logits_TE.sigmoid().gather(1, after.experts_Tk)
    close(after.gates_Tk, chosen / chosen.sum(-1, keepdim=True))
    close(after.probabilities_TE, before.probabilities_TE)
    assert "balance_bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def gate_gradients(**options) -> torch.Tensor:
    """d gate_j / d logit_i of one token: [k, E]; its experts are 5, 2 and 7."""
    rules = Rules(3, **options)
    router = router_of(rules, torch.eye(EXPERTS, dtype=torch.float64))
    x = torch.tensor([[0.1, -1, 2, -2, 0.5, 3, -0.5, 1]], dtype=torch.float64)
    x.requires_grad_()
    found = router(x)
    assert found.experts_Tk.tolist() == [[5, 2, 7]]
    rows = [torch.autograd.grad(g, x, retain_graph=True)[0] for g in found.gates_Tk[0]]
    return torch.cat(rows)


@pytest.mark.verifies(ROUTER)
def test_which_logits_a_softmax_gate_and_a_sigmoid_gate_depend_on():
    chosen, others = [5, 2, 7], [0, 1, 3, 4, 6]
    softmax = gate_gradients(renormalize=False)
    assert (softmax[:, others] < 0).all(), "any other logit that rises takes from it"
    assert (softmax != 0).all(), "all logits get a gradient"
    sigmoid = gate_gradients(score="sigmoid", renormalize=False)
    assert not sigmoid[:, others].any()
    assert torch.equal(sigmoid[:, chosen] != 0, torch.eye(3, dtype=torch.bool))
    for score in ("softmax", "sigmoid"):
        both = gate_gradients(score=score)
        assert both[:, others].abs().max() < 1e-16, "renormalised: not those left out"
        among = both[:, chosen]
        assert (among.diag() > 0).all() and (among - among.diag().diag() <= 0).all()
        assert among.sum(0).abs().max() < 1e-16, "what one gains the others lose"


@pytest.mark.verifies(ROUTER)
def test_one_renormalised_expert_teaches_the_router_nothing():
    x = reference.tokens(TOKENS, HIDDEN)
    for renormalize in (True, False):
        rules = Rules(1, renormalize=renormalize)
        router = router_of(rules, reference.weights(EXPERTS, HIDDEN, 2)["router"])
        gates = router(x).gates_Tk
        assert torch.equal(gates, torch.ones_like(gates)) == renormalize
        (gates * reference.tokens(TOKENS, 1, seed=4)).sum().backward()
        assert (router.weight.grad.abs().max() < 1e-16) == renormalize


@pytest.mark.verifies(ROUTER)
def test_updating_the_bias_evens_out_the_loads():
    made = reference.weights(EXPERTS, HIDDEN, 2)
    made["router"][3] += made["router"][3] * 3  # an expert that wins too often
    x = reference.tokens(256, HIDDEN)
    router = router_of(Rules(2, "sigmoid"), made["router"], balance_bias=True).double()
    first = router(x).counts_E
    for _ in range(200):
        router.update_balance_bias(router(x).counts_E, rate=0.01)
    last = router(x).counts_E
    mean = 256 * 2 / EXPERTS
    assert first.max() > 1.4 * mean
    assert last.max() < 1.1 * mean and last.min() > 0.9 * mean
    with pytest.raises(ValueError, match="balance_bias=True adds it"):
        router_of(Rules(2), made["router"]).update_balance_bias(last)


@pytest.mark.verifies(ROUTER)
def test_a_router_in_16_bits_keeps_its_bias_in_fp32():
    router = TopKRouter(HIDDEN, EXPERTS, 2, balance_bias=True)
    router.balance_bias.fill_(1.0)
    router.update_balance_bias(torch.arange(EXPERTS), rate=1e-3)
    steps = router.balance_bias.clone()
    for cast in (router.bfloat16(), router.half(), router.to(torch.bfloat16)):
        assert cast.weight.dtype.itemsize == 2
        assert torch.equal(cast.balance_bias, steps), "bf16 cannot hold 1 + 1e-3"
    assert router.double().balance_bias.dtype == torch.float64
    made = {"balance_bias": True, "dtype": torch.float64}
    assert TopKRouter(HIDDEN, EXPERTS, 2, **made).balance_bias.dtype == torch.float64
    made["dtype"] = torch.bfloat16
    assert TopKRouter(HIDDEN, EXPERTS, 2, **made).balance_bias.dtype == torch.float32
    assert router.to("meta").balance_bias.is_meta
    made["device"] = "meta"
    assert TopKRouter(HIDDEN, EXPERTS, 2, **made).balance_bias.is_meta


@pytest.mark.verifies(ROUTER)
def test_scores_are_computed_in_fp32_and_whatever_autocast_says():
    made = reference.weights(EXPERTS, HIDDEN, 2)
    x = reference.tokens(TOKENS, HIDDEN).bfloat16()
    router = router_of(Rules(2), made["router"].bfloat16())
    wide = router_of(Rules(2), made["router"].bfloat16().float())
    expected = wide(x.float())
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x)
    for found in (plain, cast):
        for name in ("gates_Tk", "probabilities_TE", "logits_TE", "experts_Tk"):
            one, other = getattr(found, name), getattr(expected, name)
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert expected.gates_Tk.dtype == torch.float32
    assert (
        router_of(Rules(2), made["router"])(x.double()).gates_Tk.dtype == torch.double
    )


@pytest.mark.verifies(ROUTER, STATS)
def test_no_tokens_are_a_batch_too():
    router = router_of(CASES["all at once"], reference.weights(8, HIDDEN, 2)["router"])
    x = torch.empty(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    found = router(x)
    assert found.experts_Tk.shape == found.gates_Tk.shape == (0, 4)
    assert found.counts_E.tolist() == [0] * 8 and found.dropped == 0
    (found.gates_Tk.sum() + router.stats.load_balancing_loss).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))
    assert x.grad.shape == x.shape


@pytest.mark.verifies(ROUTER)
def test_a_router_is_copied_without_its_last_batch():
    router = TopKRouter(HIDDEN, EXPERTS, 2)
    router(torch.randn(3, HIDDEN))
    other = copy.deepcopy(router)
    assert router.stats is not None and other.stats is None
    assert torch.equal(other.weight, router.weight)


@pytest.mark.verifies(f"{MODULE}:keep_best_groups")
def test_groups_are_judged_by_the_sum_of_their_best_scores():
    #                         one high       two good        the rest
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.5, 0.0, 0.1, 0.1, 0.1]])
    by_one = keep_best_groups(scores, 3, 1, 1)
    by_two = keep_best_groups(scores, 3, 1, 2)
    assert by_one[0, :3].tolist() == scores[0, :3].tolist()
    assert by_one[0, 3:].tolist() == [-torch.inf] * 6
    assert by_two[0, 3:6].tolist() == scores[0, 3:6].tolist()
    assert by_two[0, :3].tolist() == by_two[0, 6:].tolist() == [-torch.inf] * 3


WRONG = {
    "no expert chosen": ((8, 0, "softmax", 1, 1), "top_k=0 of num_experts=8"),
    "too many chosen": ((8, 9, "softmax", 1, 1), "top_k=9 of num_experts=8"),
    "no experts": ((0, 1, "softmax", 1, 1), "of num_experts=0"),
    "another score": ((8, 2, "tanh", 1, 1), "'tanh' is neither"),
    "uneven groups": ((8, 2, "softmax", 3, 1), "groups=3"),
    "no groups": ((8, 2, "softmax", 0, 1), "groups=0"),
    "no top groups": ((8, 2, "softmax", 4, 0), "top_groups=0"),
    "more top groups": ((8, 2, "softmax", 4, 5), "top_groups=5"),
    "no room in groups": ((8, 3, "softmax", 4, 1), "top_k=3 does not fit"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.verifies(f"{MODULE}:check_router")
def test_options_that_do_not_fit_are_refused(case):
    arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        check_router(*arguments)
    experts, top_k, score, groups, top_groups = arguments
    options = {"score": score, "groups": groups, "top_groups": top_groups}
    with pytest.raises(ValueError, match=message):
        TopKRouter(HIDDEN, experts, top_k, **options)
    with pytest.raises(ValueError, match="capacity_factor="):
        TopKRouter(HIDDEN, 8, 2, capacity_factor=0.0)


WRONG_TOKENS = {
    "one token": ((torch.zeros(HIDDEN), None), r"needs \[T, 6\]"),
    "a batch": ((torch.zeros(2, 3, HIDDEN), None), r"needs \[T, 6\]"),
    "another size": ((torch.zeros(3, 5), None), r"\[3, 5\]: needs \[T, 6\]"),
    "integers": ((torch.zeros(3, HIDDEN).long(), None), "not a floating-point"),
    "a mask of numbers": ((torch.zeros(3, HIDDEN), torch.ones(3)), "needs bool"),
    "a long mask": (
        (torch.zeros(3, HIDDEN), torch.ones(4, dtype=torch.bool)), r"needs bool \[3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TOKENS)
@pytest.mark.verifies(f"{MODULE}:check_tokens")
def test_tokens_and_masks_that_do_not_fit_are_refused(case):
    (x, mask), message = WRONG_TOKENS[case]
    with pytest.raises(ValueError, match=message):
        check_tokens(x, HIDDEN, mask)
    with pytest.raises(ValueError, match=message):
        TopKRouter(HIDDEN, EXPERTS, 2)(x, mask)
