"""Any size of block gives torch's softmax, also if keys are hidden from a row."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    scores = 100 * randn(2, 3, 10, seed=rank)
    values = randn(2, 10, 4, seed=5)
    scores[0, 1, :7] = -torch.inf  # the first blocks hold nothing that this row sees
    expected = scores.softmax(-1) @ values
    with Sent() as sent:
        for block in (1, 3, 10):
            out, lse = form(scores, values, block)
            same(f"attention in blocks of {block}", out, expected)
            same("its log-sum-exp", lse, scores.logsumexp(-1))
    out, lse = form(torch.full_like(scores, -torch.inf), values, 4)
    same("rows that see no key", out, torch.zeros_like(out))
    assert lse.eq(-torch.inf).all()
    sends(sent, "nothing", 0)
