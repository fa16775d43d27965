"""Choices token by token, and gradients by autograd of gates that are mostly zero."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    x = randn(10, 6, seed=rank)
    for score, groups, top_groups in (("softmax", 1, 1), ("sigmoid", 4, 2)):
        router = form(6, 8, 4, score, groups=groups, top_groups=top_groups)
        weight = router.weight.detach().clone().requires_grad_()
        router.balance_bias[5] = 0.2  # into the choice, and not into the gates
        with Sent() as sent:
            experts, gates, probabilities = router(x)
            gates.square().sum().backward()
        logits = x @ weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        chosen = torch.zeros(10, 8, dtype=torch.bool).scatter(1, experts, True)
        kept = scores * chosen
        whole = kept / kept.sum(-1, keepdim=True)
        whole.square().sum().backward()
        name = f"{score}, {top_groups} of {groups} groups"
        same(f"gates, {name}", gates, whole.gather(1, experts))
        same(f"gradient, {name}", gradient(router.weight), gradient(weight))
        total = probabilities.sum(-1)
        same("all scores of a token sum to 1", total, torch.ones_like(total))
        best = torch.stack(
            [choice(row, groups, top_groups) for row in scores + router.balance_bias]
        )
        same(f"experts, {name}", experts.sort(-1)[0], best.sort(-1)[0])
    sends(sent, "nothing", 0)


def choice(row: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """Four experts, the best ones of the groups with the largest sum of two."""
    values = row.tolist()
    step = 8 // groups
    parts = [list(range(i, i + step)) for i in range(0, 8, step)]
    parts.sort(key=lambda part: -sum(sorted(values[i] for i in part)[-2:]))
    allowed = [i for part in parts[:top_groups] for i in part]
    return torch.tensor(sorted(allowed, key=lambda i: -values[i])[:4])
