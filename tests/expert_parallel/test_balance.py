"""The losses that keep experts equally busy, and the bias that needs none."""

import pytest
import torch
import torch.distributed as dist

from tests.expert_parallel import reference
from xtrain.expert_parallel.balance import (
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
    update_balance_bias,
)

MODULE = "xtrain.expert_parallel.balance"
LOAD = f"{MODULE}:load_balancing_loss"
Z = f"{MODULE}:router_z_loss"
EXPERTS, TOP_K = 6, 2


def routed(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that want a gradient, and the top k of them."""
    logits = 2 * reference.tokens(tokens, EXPERTS, seed)
    return logits.requires_grad_(), logits.detach().topk(TOP_K, dim=1).indices


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens", [8, 64, 512])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.verifies(LOAD)
def test_uniform_routing_gives_1_for_any_number_of_tokens(tokens, top_k):
    probabilities = torch.full((tokens, 8), 1 / 8, dtype=torch.float64)
    experts = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % 8
    assert load_balancing_loss(probabilities, experts).item() == pytest.approx(1)


@pytest.mark.verifies(LOAD)
def test_collapse_gives_the_number_of_experts_over_those_of_a_token():
    for tokens in (8, 64, 512):
        for top_k in (1, 2):
            first = torch.arange(top_k).expand(tokens, top_k)
            probabilities = torch.zeros(tokens, 8, dtype=torch.float64)
            probabilities[:, :top_k] = 1 / top_k
            found = load_balancing_loss(probabilities, first).item()
            assert found == pytest.approx(8 / top_k, abs=1e-12)
    experts = torch.zeros(10, 1, dtype=torch.int64)
    probabilities = torch.zeros(10, 4, dtype=torch.float64)
    probabilities[:, 0] = 1
    assert load_balancing_loss(probabilities, experts).item() == 4
    # f = P = (.5, .25, .25, 0): the published 1.5
    experts = torch.tensor([[0], [0], [1], [2]])
    probabilities = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    assert load_balancing_loss(probabilities.repeat(4, 1), experts).item() == 1.5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.verifies(LOAD, Z)
def test_losses_and_their_gradients_are_those_of_the_formula(masked):
    logits, experts = routed(9)
    mask = torch.tensor([True] * 4 + [False] * 2 + [True] * 3) if masked else None
    real = [True] * 9 if mask is None else mask.tolist()
    chosen = [e if mine else [] for e, mine in zip(experts.tolist(), real, strict=True)]
    probabilities = logits.softmax(-1)
    for found, expected in (
        (
            load_balancing_loss(probabilities, experts, mask_T=mask),
            reference.switch_loss(list(probabilities), chosen, real, EXPERTS, TOP_K),
        ),
        (router_z_loss(logits, mask_T=mask), reference.z_loss(list(logits), real)),
    ):
        close(found, expected)
        mine = torch.autograd.grad(found, logits, retain_graph=True)
        close(mine, torch.autograd.grad(expected, logits, retain_graph=True))


@pytest.mark.verifies(LOAD)
def test_the_gradient_is_that_of_the_probabilities_alone():
    """E f_i / T for each probability: f counts, and counts have no gradient."""
    logits, experts = routed(8)
    probabilities = logits.detach().softmax(-1).requires_grad_()
    load_balancing_loss(probabilities, experts).backward()
    f_E = torch.bincount(experts.flatten(), minlength=EXPERTS) / (8 * TOP_K)
    close(probabilities.grad, (EXPERTS * f_E.double() / 8).expand(8, -1))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.verifies(LOAD, Z)
def test_no_tokens_give_zero_and_a_graph(tokens):
    logits, experts = routed(tokens)
    mask = torch.zeros(tokens, dtype=torch.bool)
    loss = load_balancing_loss(logits.softmax(-1), experts, mask_T=mask)
    loss = loss + router_z_loss(logits, mask_T=mask)
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.verifies(f"{MODULE}:sequence_balance_loss")
def test_the_loss_of_sequences_is_the_mean_over_them():
    logits = reference.tokens(3 * 5, EXPERTS).view(3, 5, EXPERTS).requires_grad_()
    probabilities = logits.softmax(-1)
    experts = logits.detach().topk(TOP_K, dim=-1).indices
    found = sequence_balance_loss(probabilities, experts)
    expected = reference.sequence_loss(probabilities, experts)
    close(found, expected)
    mine = torch.autograd.grad(found, logits, retain_graph=True)
    close(mine, torch.autograd.grad(expected, logits))
    # Two sequences, each to an expert of its own: even together, collapsed apart.
    probabilities = torch.eye(2, dtype=torch.float64)[:, None].repeat(1, 4, 1)
    experts = torch.arange(2)[:, None, None].repeat(1, 4, 1)
    assert sequence_balance_loss(probabilities, experts).item() == 2
    together = load_balancing_loss(probabilities.flatten(0, 1), experts.flatten(0, 1))
    assert together.item() == 1


@pytest.mark.verifies(f"{MODULE}:update_balance_bias")
def test_the_bias_rises_below_the_mean_load_and_falls_above():
    bias = torch.zeros(4, dtype=torch.float64)
    update_balance_bias(bias, torch.tensor([8, 0, 4, 4]), rate=0.01)
    close(bias, torch.tensor([-0.01, 0.01, 0, 0], dtype=torch.float64))
    update_balance_bias(bias, torch.tensor([0, 0, 0, 4]))
    moved = torch.tensor([-0.009, 0.011, 0.001, -0.001], dtype=torch.float64)
    close(bias, moved)
    update_balance_bias(bias, torch.tensor([0, 0, 0, 0]))
    close(bias, moved)


def across_ranks(tokens_of_rank: list[int], masked: bool):
    """The losses of all ranks' tokens, their gradients, on this rank and on one."""
    rank = dist.get_rank()
    parts = [routed(n, seed=r) for r, n in enumerate(tokens_of_rank)]
    masks = [torch.arange(n) % 3 != 1 if masked else None for n in tokens_of_rank]
    logits, experts = parts[rank]
    together = torch.cat([part.detach() for part, _ in parts]).requires_grad_()
    chosen = torch.cat([e for _, e in parts])
    mask = torch.cat(masks) if masked else None
    first = sum(tokens_of_rank[:rank])
    errors = []
    for mine, alone in (
        (
            load_balancing_loss(
                logits.softmax(-1), experts, mask_T=masks[rank], groups=[None]
            ),
            load_balancing_loss(together.softmax(-1), chosen, mask_T=mask),
        ),
        (
            router_z_loss(logits, mask_T=masks[rank], groups=[None]),
            router_z_loss(together, mask_T=mask),
        ),
    ):
        (grad,) = torch.autograd.grad(mine, logits)
        (whole,) = torch.autograd.grad(alone, together)
        part = whole[first : first + len(logits)]
        errors += [(mine - alone).abs().item(), (grad - part).abs().sum().item()]
    return errors


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [[5], [4, 7], [3, 0, 6], [0, 0, 9, 1]])
@pytest.mark.verifies(LOAD, Z)
def test_losses_of_the_tokens_of_all_ranks(world, tokens, masked):
    for errors in world(len(tokens)).run(across_ranks, tokens, masked):
        assert max(errors) < 1e-12
