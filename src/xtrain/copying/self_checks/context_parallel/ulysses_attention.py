"""Eight heads, runs of a sequence of 24: output, dq, dk and dv of one process."""

from typing import Any

import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends

SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    whole = [randn(2, h, 24, 8, seed=h) for h in (8, 2, 2)]
    q, k, v = (x.requires_grad_() for x in whole)
    grad = randn(2, 8, 24, 8, seed=9)
    for causal in (True, False):
        q.grad = k.grad = v.grad = None
        keys, values = (x.repeat_interleave(4, 1) for x in (k, v))
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
    nbytes = sum(x.nbytes for x in (mine[0], found))
    nbytes = 2 * (nbytes + max(1, size // 2) * (mine[1].nbytes + mine[2].nbytes))
    sends(
        sent,
        "(N-1)/N of q, k, v and the output forward, and of their gradients",
        (size - 1) / size * nbytes,
    )
