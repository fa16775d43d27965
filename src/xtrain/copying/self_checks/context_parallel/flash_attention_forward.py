"""Three tiles of queries and of keys, with 4 query heads to 2 key heads."""

from typing import Any

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.context_parallel.flash_attention_forward import TILE


def check(form: Any, rank: int, size: int) -> None:
    length = 2 * TILE + 7
    q = randn(1, 4, length, 8, seed=rank)
    k, v = (randn(1, 2, length, 8, seed=s) for s in (8, 9))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    with Sent() as sent:
        for causal, name in ((True, "causal"), (False, "not causal")):
            out, lse = form(q, k, v, causal)
            expected = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
            same(f"attention, {name}", out, expected)
            scores = q @ keys.mT / 8**0.5
            scores = scores.masked_fill(later, -torch.inf) if causal else scores
            same("its log-sum-exp", lse, scores.logsumexp(-1))
    sends(sent, "nothing", 0)
