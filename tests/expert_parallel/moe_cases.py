"""Layers with given weights; cases of several ranks, their truth, and their runs."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.expert_parallel import reference
from tests.expert_parallel.reference import Rules
from xtrain.comm.collective_choice import collectives_named
from xtrain.expert_parallel import (
    GShardMoE,
    MoE,
    load_balancing_loss,
    router_z_loss,
)

HIDDEN, INNER, EXPERTS, SHARED = 6, 5, 8, 7
ALPHA, BETA = 0.3, 0.1
"""Coefficients of the two losses on the router."""
MATRICES = ("gate", "up", "down")


def layer_of(rules: Rules, made: dict[str, Tensor], kind=MoE, **options) -> MoE:
    """A layer with these weights, float64."""
    options = {**rules.__dict__, **options}
    top_k = options.pop("top_k")
    if "shared_gate" in made:
        options["shared_intermediate_size"] = len(made["shared_gate"])
    num_experts, hidden = made["router"].shape
    inner = made["gate"].shape[1]
    layer = kind(hidden, inner, num_experts, top_k, dtype=torch.float64, **options)
    fill(layer, made)
    return layer.double()


@torch.no_grad()
def fill(layer: nn.Module, made: dict[str, Tensor]) -> None:
    for name, parameter in parameters(layer).items():
        parameter.copy_(made[name])


def parameters(layer: MoE) -> dict[str, nn.Parameter]:
    """By the names of `reference.weights`."""
    found = {"router": layer.router.weight}
    for name in MATRICES:
        found[name] = getattr(layer.experts, f"{name}_proj")
        if layer.shared is not None:
            found[f"shared_{name}"] = getattr(layer.shared, f"{name}_proj").weight
    return found


def gradients(layer: MoE) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters(layer).items()}


def shared_of(made: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
    if "shared_gate" not in made:
        return None
    return tuple(made[f"shared_{name}"] for name in MATRICES)


def close(found, expected, limit: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@dataclass
class Case:
    """Tokens and gradients of each rank, one layer; x[r] may have no rows."""

    name: str
    rules: Rules
    made: dict[str, Tensor]
    x: list[Tensor]
    grad: list[Tensor]
    mask: list[Tensor] | None = None
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)


def case_of(
    name: str, rules: Rules, counts: list[int], *, experts: int = EXPERTS,
    shared: int = 0, masked: bool = False, biased: bool = False, **options: Any,
) -> Case:  # fmt: skip
    """A case of these numbers of tokens."""
    return Case(
        name, rules, reference.weights(experts, HIDDEN, INNER, shared=shared),
        [reference.tokens(n, HIDDEN, seed=r) for r, n in enumerate(counts)],
        [reference.tokens(n, HIDDEN, seed=50 + r) for r, n in enumerate(counts)],
        [torch.arange(n) % 3 != r for r, n in enumerate(counts)] if masked else None,
        reference.tokens(1, experts, seed=3)[0] / 4 if biased else None, options,
    )  # fmt: skip


@dataclass
class Found:
    """Of one rank; `grads` of the router and the shared expert are its own tokens'."""

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor]
    losses: list[float]
    counts: list[int]
    dropped: int


@dataclass
class Truth:
    """Of all ranks; y and dx by rank, grads of the whole layer."""

    y: list[Tensor]
    dx: list[Tensor]
    grads: dict[str, Tensor]
    losses: list[float]
    counts: list[list[int]]
    chosen: list[list[list[int]]]
    """Experts of each kept copy, by rank and token."""


def truth_of(case: Case) -> Truth:
    """The dense layer on the tokens of each rank; the losses are those of all."""
    made = {name: w.clone().requires_grad_() for name, w in case.made.items()}
    inputs = [x.clone().requires_grad_() for x in case.x]
    masks = case.mask or [torch.ones(len(x), dtype=torch.bool) for x in inputs]
    answers = [
        reference.dense_moe(
            x, *(made[n] for n in ("router", *MATRICES)), case.rules,
            bias_E=case.bias, mask_T=mask, shared=shared_of(made),
        )
        for x, mask in zip(inputs, masks, strict=True)
    ]  # fmt: skip
    real = torch.cat(masks).tolist()
    chosen = [mine for answer in answers for mine in answer.chosen]
    probabilities = torch.cat([answer.probabilities_TE for answer in answers])
    experts = len(made["router"])
    losses = [
        reference.switch_loss(probabilities, chosen, real, experts, case.rules.top_k),
        reference.z_loss(torch.cat([answer.logits_TE for answer in answers]), real),
    ]
    pairs = zip(answers, case.grad, strict=True)
    total = sum((answer.output_TH * grad).sum() for answer, grad in pairs)
    total = total + ALPHA * losses[0] + BETA * losses[1]
    total = total + 0 * sum(w.sum() for w in (*made.values(), *inputs))
    total.backward()
    kept = [
        [
            [e for e, stays in zip(row, stay, strict=True) if stays]
            for row, stay in zip(answer.chosen, answer.kept, strict=True)
        ]
        for answer in answers
    ]
    return Truth(
        [answer.output_TH.detach() for answer in answers],
        [x.grad for x in inputs],
        {name: w.grad for name, w in made.items()},
        [loss.item() for loss in losses],
        [answer.counts for answer in answers],
        kept,
    )


def sharded(case: Case, group=None) -> GShardMoE:
    """This rank's part of the case's layer."""
    options = dict(case.options)
    named = options.pop("collectives", "torch")
    sends = {n: options.pop(n) for n in ("once_a_rank", "placement") if n in options}
    full = layer_of(
        case.rules, case.made, balance_bias=case.bias is not None, **options
    )
    if case.bias is not None:
        full.router.balance_bias.copy_(case.bias)
    return GShardMoE.from_full(
        full, group, collectives=collectives_named(named), **sends
    )


def losses_of(layer: MoE, group=None) -> list[Tensor]:
    """The two losses of the tokens of all ranks."""
    routing = layer.router.stats.routing
    options = {"mask_T": routing.mask_T, "groups": [group]}
    return [
        load_balancing_loss(routing.probabilities_TE, routing.experts_Tk, **options),
        router_z_loss(routing.logits_TE, **options),
    ]


def trained(cases: list[Case]) -> list[Found]:
    """Each case on this rank's tokens: forward, losses, backward."""
    rank = dist.get_rank()
    found = []
    for case in cases:
        layer = sharded(case)
        x = case.x[rank].clone().requires_grad_()
        y = layer(x, None if case.mask is None else case.mask[rank])
        losses = losses_of(layer)
        total = (y * case.grad[rank]).sum() + ALPHA * losses[0] + BETA * losses[1]
        total.backward()
        layer.sum_replicas()
        stats = layer.router.stats
        found.append(
            Found(
                y.detach(), x.grad, gradients(layer), [term.item() for term in losses],
                stats.counts_E.tolist(), stats.dropped,
            )
        )  # fmt: skip
    return found


def check(case: Case, by_rank: list[Found], limit: float = 1e-11) -> None:
    """What the ranks found is the truth: everything, on every rank."""
    expected, ranks = truth_of(case), len(by_rank)
    local = len(case.made["router"]) // ranks
    for rank, found in enumerate(by_rank):
        close(found.y, expected.y[rank], limit)
        close(found.dx, expected.dx[rank], limit)
        close(found.losses, expected.losses, limit)
        assert found.counts == expected.counts[rank]
        real = len(case.x[rank]) if case.mask is None else int(case.mask[rank].sum())
        assert found.dropped == real * case.rules.top_k - sum(found.counts)
        held = list(range(rank * local, (rank + 1) * local))
        if "placement" in case.options:
            held = list(case.options["placement"].experts[rank])
        for name in MATRICES:  # summed over the tokens of all ranks already
            close(found.grads[name], expected.grads[name][held], limit)
    for name in expected.grads.keys() - set(MATRICES):
        total = sum(found.grads[name] for found in by_rank)
        close(total, expected.grads[name], limit)
