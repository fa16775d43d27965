"""Runs of 6 of a sequence on 4 ranks: output, dq, dk and dv of one process."""

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.context_parallel.all_gather_attention import (
    all_gather_attention,
)


def check(rank: int, size: int) -> None:
    whole = [randn(2, h, 24, 8, seed=h, dtype=torch.float64) for h in (4, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 4, 24, 8, seed=9, dtype=torch.float64)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        out.backward(grad)
        mine = [x.detach().chunk(size, 2)[rank].requires_grad_() for x in (q, k, v)]
        with Sent() as sent:
            found = all_gather_attention(mine[0], mine[1], mine[2], causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank], 1e-12)
        for what, x, full in zip("qkv", mine, (q, k, v), strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part, 1e-12)
    nbytes = 2 * (k.nbytes + v.nbytes)
    formula = f"(N-1)/N of {nbytes:,} bytes of K, V, dK and dV"
    sends(sent, formula, (size - 1) / size * nbytes)
