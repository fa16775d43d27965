"""The layer on one device against loops over tokens and experts: every gradient."""

import pytest
import torch

from tests.expert_parallel import reference
from tests.expert_parallel.moe_cases import (
    ALPHA,
    BETA,
    EXPERTS,
    HIDDEN,
    INNER,
    SHARED,
    close,
    fill,
    gradients,
    layer_of,
    shared_of,
)
from tests.expert_parallel.reference import Rules
from tests.expert_parallel.test_router import CASES
from xtrain.expert_parallel import DeepSeekMoE, expert_mlp, moe_backward, moe_forward

MODULE = "xtrain.expert_parallel.moe"
LAYER = f"{MODULE}:MoE"
BY_HAND = [
    f"xtrain.expert_parallel.moe_by_hand:moe_{way}ward" for way in ("for", "back")
]
TOKENS = 13


def truth(rules: Rules, made, x, grad, bias=None, mask=None):
    """The dense answer, dx and the gradients of the weights."""
    made = {name: w.clone().requires_grad_() for name, w in made.items()}
    x = x.clone().requires_grad_()
    shared = shared_of(made)
    answer = reference.dense_moe(
        x, made["router"], made["gate"], made["up"], made["down"], rules,
        bias_E=bias, mask_T=mask, shared=shared,
    )  # fmt: skip
    loss = (answer.output_TH * grad).sum()
    loss = loss + ALPHA * answer.load_balancing_loss + BETA * answer.z_loss
    loss.backward()
    zeros = {
        n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in made.items()
    }
    return answer, x.grad, zeros


@pytest.mark.parametrize("options", [{}, {"path": "padded"}, {"backward": "autograd"}])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.verifies(LAYER, f"{MODULE}:SharedExpert")
@pytest.mark.verifies("xtrain.expert_parallel.routing:weighted_sum")
def test_output_and_every_gradient_and_the_losses(case, options):
    rules = CASES[case]
    for shared, masked, biased in ((0, False, False), (SHARED, True, True)):
        made = reference.weights(EXPERTS, HIDDEN, INNER, shared=shared)
        x, grad = (reference.tokens(TOKENS, HIDDEN, seed) for seed in (0, 1))
        mask = torch.arange(TOKENS) % 4 != 2 if masked else None
        bias = reference.tokens(1, EXPERTS, seed=3)[0] / 4 if biased else None
        answer, dx, expected = truth(rules, made, x, grad, bias, mask)
        layer = layer_of(rules, made, balance_bias=biased, **options)
        if biased:
            layer.router.balance_bias.copy_(bias)
        mine = x.clone().requires_grad_()
        y = layer(mine, mask)
        stats = layer.router.stats
        loss = (y * grad).sum()
        loss = loss + ALPHA * stats.load_balancing_loss + BETA * stats.z_loss
        loss.backward()
        close(y, answer.output_TH)
        close(mine.grad, dx)
        close(gradients(layer), expected)
        if masked:
            assert (layer.shared(x)[~mask] == y[~mask]).all(), "padding is not routed"


@pytest.mark.parametrize("top_k", range(1, EXPERTS + 1))
@pytest.mark.verifies("xtrain.expert_parallel.moe_by_hand:SavedMoE")
@pytest.mark.verifies(*BY_HAND, "xtrain.expert_parallel.moe_by_hand:router_gradient")
def test_the_whole_layer_by_hand(top_k):
    made = reference.weights(EXPERTS, HIDDEN, INNER)
    x, grad = (reference.tokens(TOKENS, HIDDEN, seed) for seed in (0, 1))
    weights = {name: w.clone().requires_grad_() for name, w in made.items()}
    dense = x.clone().requires_grad_()
    answer = reference.dense_moe(dense, *weights.values(), Rules(top_k))
    answer.output_TH.backward(grad)
    y, saved = moe_forward(x, *made.values(), top_k)
    dx, *dweights = moe_backward(grad, saved)
    close(y, answer.output_TH)
    close(dx, dense.grad)
    close(dweights, [w.grad for w in weights.values()])


@pytest.mark.verifies(LAYER)
def test_any_shape_of_batch_and_no_tokens():
    made = reference.weights(EXPERTS, HIDDEN, INNER, shared=SHARED)
    layer = layer_of(Rules(2), made)
    x = reference.tokens(12, HIDDEN)
    flat = layer(x)
    close(layer(x.view(3, 4, HIDDEN)), flat.view(3, 4, HIDDEN))
    mask = torch.arange(12) % 3 > 0
    masked = layer(x.view(2, 2, 3, HIDDEN), mask.view(2, 2, 3))
    close(masked.flatten(0, 2), layer(x, mask))
    empty = torch.empty(2, 0, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = layer(empty)
    assert y.shape == empty.shape
    y.sum().backward()
    assert empty.grad.shape == empty.shape
    for gradient in gradients(layer).values():
        assert not gradient.any(), "every parameter is in the graph, none moves"


@pytest.mark.verifies(LAYER)
def test_all_tokens_of_one_expert_and_experts_without_any():
    made = reference.weights(EXPERTS, HIDDEN, INNER)
    x = reference.tokens(TOKENS, HIDDEN).abs()
    made["router"][5] = 9.0  # the inputs are positive: it always wins
    grad = reference.tokens(TOKENS, HIDDEN, seed=1)
    layer = layer_of(Rules(1, renormalize=False), made)
    answer, dx, expected = truth(Rules(1, renormalize=False), made, x, grad)
    mine = x.clone().requires_grad_()
    y = layer(mine)
    stats = layer.router.stats
    assert stats.counts_E.tolist() == [0] * 5 + [TOKENS] + [0] * 2
    assert stats.load_balancing_loss.item() == pytest.approx(EXPERTS, rel=1e-3)
    loss = (y * grad).sum() + ALPHA * stats.load_balancing_loss + BETA * stats.z_loss
    loss.backward()
    close(y, answer.output_TH)
    close(mine.grad, dx)
    close(gradients(layer), expected)


@pytest.mark.verifies(LAYER)
def test_dropped_copies_give_zero_and_a_token_without_any_is_left_out():
    made = reference.weights(EXPERTS, HIDDEN, INNER)
    x = reference.tokens(1, HIDDEN).repeat(TOKENS, 1)  # all tokens tie in everything
    layer = layer_of(Rules(2, capacity_factor=1.0), made)
    capacity = -(-TOKENS * 2 // EXPERTS)
    mine = x.clone().requires_grad_()
    y = layer(mine)
    y.sum().backward()
    whole = layer_of(Rules(2), made)(x)
    close(y[:capacity], whole[:capacity])
    assert torch.equal(y[capacity:], torch.zeros_like(y[capacity:]))
    assert torch.equal(mine.grad[capacity:], torch.zeros_like(y[capacity:]))
    assert layer.router.stats.dropped == 2 * (TOKENS - capacity)


@pytest.mark.verifies(LAYER)
def test_several_adamw_steps_follow_the_dense_layer():
    made = reference.weights(EXPERTS, HIDDEN, INNER, shared=SHARED)
    layer = layer_of(Rules(2), made)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
    dense = {name: w.clone().requires_grad_() for name, w in made.items()}
    other = torch.optim.AdamW(dense.values(), lr=0.02)
    shared = shared_of(dense)
    for step in range(4):
        x = reference.tokens(TOKENS, HIDDEN, seed=step)
        optimizer.zero_grad()
        y, stats = layer(x), layer.router.stats
        (y.square().sum() / TOKENS + ALPHA * stats.load_balancing_loss).backward()
        optimizer.step()
        other.zero_grad()
        answer = reference.dense_moe(
            x, *(dense[n] for n in ("router", "gate", "up", "down")), Rules(2),
            shared=shared,
        )  # fmt: skip
        loss = answer.output_TH.square().sum() / TOKENS
        (loss + ALPHA * answer.load_balancing_loss).backward()
        other.step()
    for name, parameter in dense.items():
        module, _, matrix = name.rpartition("_")
        if name == "router":
            found = layer.router.weight
        elif module:
            found = getattr(layer.shared, f"{matrix}_proj").weight
        else:
            found = getattr(layer.experts, f"{matrix}_proj")
        close(found, parameter, 1e-10)


@pytest.mark.verifies(f"{MODULE}:DeepSeekMoE")
def test_deepseeks_layer_is_sigmoid_renormalised_shared_and_biased():
    made = reference.weights(EXPERTS, HIDDEN, INNER, shared=2 * INNER)
    layer = DeepSeekMoE(
        HIDDEN, INNER, EXPERTS, 4, shared_experts=2, groups=4, top_groups=2, scale=2.5
    ).double()
    fill(layer, made)
    rules = Rules(4, "sigmoid", True, 2.5, groups=4, top_groups=2)
    x, grad = (reference.tokens(TOKENS, HIDDEN, seed) for seed in (0, 1))
    for _ in range(3):  # the bias that one step gave is used in the next one
        bias = layer.router.balance_bias.clone()
        answer, dx, expected = truth(rules, made, x, grad, bias)
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        y, stats = layer(mine), layer.router.stats
        loss = (y * grad).sum()
        loss = loss + ALPHA * stats.load_balancing_loss + BETA * stats.z_loss
        loss.backward()
        close(y, answer.output_TH)
        close(mine.grad, dx)
        close(gradients(layer), expected)
        assert stats.counts_E.tolist() == answer.counts
        layer.router.update_balance_bias(stats.counts_E, rate=0.3)
        assert not torch.equal(layer.router.balance_bias, bias)
    assert layer.shared.gate_proj.weight.shape == (2 * INNER, HIDDEN)
    with_one = DeepSeekMoE(HIDDEN, INNER, EXPERTS, 2)
    assert with_one.shared.gate_proj.weight.shape == (INNER, HIDDEN)
    assert with_one.router.balance_bias is not None
    assert DeepSeekMoE(HIDDEN, INNER, EXPERTS, 2, shared_experts=0).shared is None


@pytest.mark.verifies(LAYER)
def test_gates_are_computed_in_fp32_and_the_output_has_the_dtype_of_the_input():
    made = reference.weights(EXPERTS, HIDDEN, INNER, shared=SHARED)
    half = layer_of(Rules(2), made).bfloat16()
    wide = layer_of(Rules(2), {n: w.bfloat16().double() for n, w in made.items()})
    x = reference.tokens(TOKENS, HIDDEN).bfloat16()
    y = half(x.requires_grad_())
    assert y.dtype == torch.bfloat16
    assert half.router.stats.routing.gates_Tk.dtype == torch.float32
    y.sum().backward()
    assert {g.dtype for g in gradients(half).values()} == {torch.bfloat16}
    exact = wide(x.detach().double())
    assert torch.equal(
        half.router.stats.routing.experts_Tk, wide.router.stats.routing.experts_Tk
    )
    close(y.double(), exact, 3e-2)


@pytest.mark.verifies(LAYER)
def test_autocast_casts_the_experts_and_not_the_router():
    made = reference.weights(EXPERTS, HIDDEN, INNER, shared=SHARED)
    layer = layer_of(Rules(2), made).float()
    x = reference.tokens(TOKENS, HIDDEN).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    routing = layer.router.stats.routing
    assert torch.equal(routing.logits_TE, layer.router(x).logits_TE)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert {g.dtype for g in gradients(layer).values()} == {torch.float32}
    close(y.float(), layer(x), 3e-2)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.verifies(LAYER)
def test_a_mixture_of_copies_of_one_mlp_begins_as_it(renormalize):
    made = reference.weights(EXPERTS, HIDDEN, INNER)
    for name in ("gate", "up", "down"):
        made[name][:] = made[name][0].clone()
    layer = layer_of(Rules(2, renormalize=renormalize), made)
    x = reference.tokens(TOKENS, HIDDEN)
    counts = torch.tensor([TOKENS] + [0] * (EXPERTS - 1))
    mlp = expert_mlp(x, counts, *layer.experts.parameters())
    if renormalize:
        close(layer(x), mlp)
    else:  # with a router that knows nothing: 2 of 8 equal gates
        layer.router.weight.data.zero_()
        close(layer(x), mlp * 2 / EXPERTS)
