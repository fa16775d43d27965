"""Runs of a sequence of 24: output, dq, dk and dv of one process."""

from typing import Any

import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    whole = [randn(2, h, 24, 8, seed=h) for h in (4, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 4, 24, 8, seed=9)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        out.backward(grad)
        mine = [x.detach().chunk(size, 2)[rank].requires_grad_() for x in (q, k, v)]
        with Sent() as sent:
            found = form(mine[0], mine[1], mine[2], causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank])
        for what, x, full in zip("qkv", mine, (q, k, v), strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part)
    nbytes = 2 * (k.nbytes + v.nbytes)
    sends(
        sent,
        "(N-1)/N of all K and V forward, and of dK and dV",
        (size - 1) / size * nbytes,
    )
