"""1 with equal loads, E at collapse; its gradient counts the copies as constants."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
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
