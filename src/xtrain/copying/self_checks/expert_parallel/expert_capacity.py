"""The mask of a loop that gives out places one by one."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
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
