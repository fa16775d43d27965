"""Three tiles of queries and of keys, with 4 query heads to 2 key heads."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.context_parallel.flash_attention_backward import TILE


def check(form: Any, rank: int, size: int) -> None:
    length = 2 * TILE + 7
    q = randn(1, 4, length, 8, seed=rank).requires_grad_()
    k, v = (randn(1, 2, length, 8, seed=s) for s in (8, 9))
    k, v = k.requires_grad_(), v.requires_grad_()
    grad = randn(1, 4, length, 8, seed=7)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with Sent() as sent:
        for causal, name in ((True, "causal"), (False, "not causal")):
            scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
            scores = scores.masked_fill(later, -torch.inf) if causal else scores
            lse = scores.logsumexp(-1)
            out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
            q.grad = k.grad = v.grad = None
            out.backward(grad)
            with torch.no_grad():
                found = form(grad, q, k, v, out, lse, causal)
            for what, x, whole in zip("qkv", found, (q, k, v), strict=True):
                same(f"d{what}, {name}", x, gradient(whole))
    sends(sent, "nothing", 0)
