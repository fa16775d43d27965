"""A sequence of 24: what one process gets, causal or not, zigzag or not."""

from typing import Any

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, randn, same, sends

SIZES = (1, 2, 3, 4)  # zigzag cuts 24 tokens into twice as many pieces


def check(form: Any, rank: int, size: int) -> None:
    q = randn(2, 4, 24, 8, seed=1)
    k, v = (randn(2, 2, 24, 8, seed=s) for s in (2, 3))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    run, pieces = torch.arange(24).chunk(size)[rank], torch.arange(24).chunk(2 * size)
    zigzag = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    for causal in (True, False):
        whole = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        scores = q @ keys.mT / 8**0.5
        scores = scores.masked_fill(later, -torch.inf) if causal else scores
        for balance, here in (("none", run), ("zigzag", zigzag)):
            a, b, c = (x[:, :, here] for x in (q, k, v))
            with Sent() as sent:
                out, lse = form(a, b, c, causal, balance)
            name = f"causal={causal}, balance={balance}"
            same(f"attention, {name}", out, whole[:, :, here])
            same("its log-sum-exp", lse, scores.logsumexp(-1)[:, :, here])
    nbytes = 2 * b.nbytes
    sends(sent, "N-1 times K and V", (size - 1) * nbytes)
