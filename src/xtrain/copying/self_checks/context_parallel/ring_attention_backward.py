"""A sequence of 24: dq, dk and dv of one process, each on its rank."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends

SIZES = (1, 2, 3, 4)  # zigzag cuts 24 tokens into twice as many pieces


def check(form: Any, rank: int, size: int) -> None:
    q = randn(2, 4, 24, 8, seed=1).requires_grad_()
    k, v = (randn(2, 2, 24, 8, seed=s) for s in (2, 3))
    k, v = k.requires_grad_(), v.requires_grad_()
    grad = randn(2, 4, 24, 8, seed=4)
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
                found = form(dO, qkv[0], qkv[1], qkv[2], o, log, causal, balance)
            for what, x, whole in zip("qkv", found, (q, k, v), strict=True):
                name = f"d{what}, causal={causal}, balance={balance}"
                same(name, x, gradient(whole)[:, :, here])
    nbytes = 2 * qkv[1].nbytes
    sends(
        sent,
        "N-1 times K and V, and N times dK and dV",
        (2 * size - 1) * nbytes * (size > 1),
    )
