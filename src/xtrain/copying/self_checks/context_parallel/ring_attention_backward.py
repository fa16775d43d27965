"""A sequence of 24 on 4 ranks: dq, dk and dv of one process, each on its own."""

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.context_parallel.ring_attention_backward import (
    ring_attention_backward,
)


def check(rank: int, size: int) -> None:
    q = randn(2, 4, 24, 8, seed=1, dtype=torch.float64).requires_grad_()
    k, v = (randn(2, 2, 24, 8, seed=s, dtype=torch.float64) for s in (2, 3))
    k, v = k.requires_grad_(), v.requires_grad_()
    grad = randn(2, 4, 24, 8, seed=4, dtype=torch.float64)
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    run, pieces = torch.arange(24).chunk(size)[rank], torch.arange(24).chunk(2 * size)
    zigzag = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
    for causal in (True, False):
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
        scores = scores.masked_fill(later, -torch.inf) if causal else scores
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        q.grad = k.grad = v.grad = None
        out.backward(grad)
        for balance, here in (("none", run), ("zigzag", zigzag)):
            dO, *qkv, o, log = (
                x.detach()[:, :, here] for x in (grad, q, k, v, out, lse)
            )
            with Sent() as sent:
                found = ring_attention_backward(
                    dO, qkv[0], qkv[1], qkv[2], o, log, causal, balance
                )
            for what, x, whole in zip("qkv", found, (q, k, v), strict=True):
                name = f"d{what}, causal={causal}, balance={balance}"
                same(name, x, gradient(whole)[:, :, here], 1e-12)
    nbytes = 2 * qkv[1].nbytes
    formula = f"N-1 times {nbytes:,} bytes of K and V, N times as much of dK and dV"
    sends(sent, formula, (2 * size - 1) * nbytes)
