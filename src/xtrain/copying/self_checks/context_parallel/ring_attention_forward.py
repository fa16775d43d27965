"""A sequence of 24 on 4 ranks: what one process gets, causal or not, zigzag or not."""

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.context_parallel.ring_attention_forward import (
    ring_attention_forward,
)


def check(rank: int, size: int) -> None:
    q = randn(2, 4, 24, 8, seed=1, dtype=torch.float64)
    k, v = (randn(2, 2, 24, 8, seed=s, dtype=torch.float64) for s in (2, 3))
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
                out, lse = ring_attention_forward(a, b, c, causal, balance)
            name = f"causal={causal}, balance={balance}"
            same(f"attention, {name}", out, whole[:, :, here], 1e-12)
            same("its log-sum-exp", lse, scores.logsumexp(-1)[:, :, here], 1e-12)
    nbytes = 2 * b.nbytes
    formula = f"N-1 times {nbytes:,} bytes of K and V"
    sends(sent, formula, (size - 1) * nbytes)
