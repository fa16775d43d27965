"""Eight heads, a sequence on 4 ranks: output, dq, dk and dv of one process."""

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.context_parallel.ulysses_attention import (
    ulysses_attention,
)


def check(rank: int, size: int) -> None:
    whole = [randn(2, h, 24, 8, seed=h, dtype=torch.float64) for h in (8, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 8, 24, 8, seed=9, dtype=torch.float64)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(4, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
        out.backward(grad)
        mine = [x.detach().chunk(size, 2)[rank].requires_grad_() for x in (q, k, v)]
        with Sent() as sent:
            found = ulysses_attention(mine[0], mine[1], mine[2], causal)
            found.backward(grad.chunk(size, 2)[rank])
        same(f"attention, causal={causal}", found, out.chunk(size, 2)[rank], 1e-12)
        for what, x, full in zip("qkv", mine, (q, k, v), strict=True):
            part = gradient(full).chunk(size, 2)[rank]
            same(f"d{what}, causal={causal}", gradient(x), part, 1e-12)
    nbytes = 2 * sum(x.nbytes for x in (mine[0], found, *2 * mine[1:]))  # keys twice
    formula = f"(N-1)/N of {nbytes:,} bytes of q, k, v, the output, their gradients"
    sends(sent, formula, (size - 1) / size * nbytes)
