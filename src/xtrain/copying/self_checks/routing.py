"""Of routers: choices, gates, places and loads, token by token."""

from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import GROUP, Sent, gradient, randn, same, sends


def check_expert_capacity(form: Any, rank: int, size: int) -> None:
    """The mask of a loop that gives out places one by one."""
    experts = randn(20, 8, seed=rank).topk(2)[1]
    for factor, places in ((0.5, 3), (1.0, 5), (1.25, 7), (8.0, 40)):
        with Sent() as sent:
            capacity, kept = form(experts, 8, factor)
        assert capacity == places
        expected, taken = torch.zeros(20, 2, dtype=torch.bool), [0] * 8
        for choice in range(2):
            for token in range(20):
                expert = int(experts[token, choice])
                taken[expert] += 1
                expected[token, choice] = taken[expert] <= places
        same(f"kept with {places} places", kept.int(), expected.int())
    sends(sent, "nothing", 0)


def check_load_balancing_loss(form: Any, rank: int, size: int) -> None:
    """1 with equal loads, E at collapse; counts of copies are constants in backward."""
    one = torch.tensor(1.0)
    with Sent() as sent:
        for tokens in (4, 64):  # for any number of tokens
            even = torch.arange(2 * tokens).remainder(8).view(tokens, 2)
            flat = torch.full((tokens, 8), 1 / 8)
            same("equal loads", form(flat, even), one)
        alone = torch.eye(8)[torch.zeros(10, dtype=torch.int64)]
        found = form(alone, torch.zeros(10, 1, dtype=torch.int64))
        same("one expert of 8 gets all", found, 8 * one)

        logits = randn(10, 8, seed=rank).requires_grad_()
        probabilities, mask = logits.softmax(-1), torch.arange(10) < 7
        experts = probabilities.topk(2)[1]
        loss = form(probabilities, experts, mask)
        probabilities.retain_grad()
        loss.backward()
    total, share = 0.0, torch.zeros(8)
    for token in range(7):
        for choice in experts[token].tolist():
            share[choice] += 1 / 14
    for expert in range(8):
        mean = sum(probabilities[t, expert].item() for t in range(7)) / 7
        total += 8 * share[expert].item() * mean
    same("7 of 10 tokens, 3 padded", loss.detach(), total * one)
    expected = 8 / 7 * share.expand(10, 8) * mask.unsqueeze(1)
    same("its gradient", gradient(probabilities), expected)
    sends(sent, "nothing", 0)


def check_plan_placement(form: Any, rank: int, size: int) -> None:
    """The best of all tables for two ranks, and one that all ranks find."""
    one = torch.ones((), dtype=torch.float64)
    small = ([8, 2, 2, 1], 2), ([10, 6, 5], 2), ([9, 1, 1, 1], 3), ([7, 5, 3, 2, 1], 3)
    with Sent() as sent:
        found = [form(loads, 2, slots) for loads, slots in small]
    for (loads, slots), mine in zip(small, found, strict=True):
        tables = [  # with each expert on rank 0, on rank 1 or on both
            [[e for e, on in enumerate(where) if r in on] for r in (0, 1)]
            for where in product(([0], [1], [0, 1]), repeat=len(loads))
        ]
        fit = [table for table in tables if max(map(len, table)) <= slots]
        best = min(largest_load(loads, table) for table in fit)
        ratio = largest_load(loads, mine) / best
        # The best table leaves a slot free: 7 2 and 5 3 1. The form fills all.
        off = 0.06 if loads[0] == 7 else 1e-12
        same(f"the largest load of {loads} over the best one", ratio * one, one, off)

    chosen = randn(200, 16, seed=rank).add(torch.arange(16) / 8).topk(2)[1]
    counts = torch.bincount(chosen.flatten(), minlength=16)
    dist.all_reduce(counts, group=GROUP.get())
    table = form(counts.tolist(), 4, 6)
    over = largest_load(counts.tolist(), table) / counts.sum().item() * 4
    same("16 experts on 4 ranks, over the mean", over * one, one, 0.05)
    numbers = torch.tensor(table)
    total = numbers.clone()
    dist.all_reduce(total, group=GROUP.get())
    same("every rank finds this table", total, size * numbers)
    sends(sent, "nothing", 0)


def largest_load(loads: list[int], table: list[list[int]]) -> float:
    """Of a rank; copies of an expert share its tokens."""
    held = [expert for experts in table for expert in experts]
    return max(sum(loads[e] / held.count(e) for e in experts) for experts in table)


def check_top_k_gradient(form: Any, rank: int, size: int) -> None:
    """Autograd's gradient of top-k, and of gates that are made of it."""
    logits = randn(12, 8, seed=rank).requires_grad_()
    grad = randn(12, 3, seed=9)
    values, experts = logits.sigmoid().topk(3)
    values.backward(grad)
    with Sent() as sent:
        dscores = form(grad, experts, 8)
    scores = logits.detach().sigmoid()
    dlogits = dscores * scores * (1 - scores)
    same("the gradient of sigmoid and top-k", dlogits, gradient(logits))
    zeros = dscores.eq(0).sum(-1)
    same("zero for the five others", zeros, torch.full_like(zeros, 5))

    logits.grad = None
    probabilities = logits.softmax(-1)
    probabilities.gather(1, experts).backward(grad)
    p = probabilities.detach()
    dlogits = p * (dscores - (dscores * p).sum(-1, keepdim=True))
    same("with a softmax all logits get one", dlogits, gradient(logits))
    sends(sent, "nothing", 0)


def check_top_k_router(form: Any, rank: int, size: int) -> None:
    """Choices token by token; gradients are autograd's of gates mostly zero."""
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


def check_update_balance_bias(form: Any, rank: int, size: int) -> None:
    """A bias on a router that prefers two experts makes the loads even."""
    bias = torch.zeros(4)
    with Sent() as sent:
        form(bias, torch.tensor([7, 1, 4, 4]), rate=0.5)
    same("down, up, and as it was", bias, torch.tensor([-0.5, 0.5, 0.0, 0.0]))

    scores = randn(96, 8, seed=rank).add(torch.tensor([2, 1, 0, 0, 0, 0, 0, 0.0]))
    bias = torch.zeros(8)
    for step in range(80):
        counts = torch.bincount((scores + bias).topk(2)[1].flatten(), minlength=8)
        form(bias, counts, rate=0.1 if step < 40 else 0.01)
    largest = counts.max() / 24
    same("80 steps later, the largest load / the mean", largest, torch.tensor(1.0), 0.1)
    sends(sent, "nothing", 0)
