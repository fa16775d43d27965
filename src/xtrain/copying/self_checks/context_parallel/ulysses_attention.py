"""Heads and a sequence cut over the ranks: output, dq, dk and dv of one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.context_parallel.ulysses_attention import (
    ulysses_attention,
)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for heads, key_heads, local, causal, scale in (
        (2, 1, 2, True, None),
        (3, 3, 5, False, 0.3),
        (6, 2, 10, True, None),
        (6, 2, 10, False, 0.0),
    ):
        shapes = [(2, size * h, local * size, 8) for h in (heads, key_heads, key_heads)]
        whole = [randn(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)]
        grad = randn(*shapes[0], seed=9, dtype=dtype)
        q, k, v = (x.to(torch.float64, copy=True).requires_grad_() for x in whole)
        exact = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
        grads = torch.autograd.grad(exact, (q, k, v), grad.double())
        mine = [x.chunk(size, 2)[rank].clone().requires_grad_() for x in whole]
        kept = [x.detach().clone() for x in mine]
        with Sent(group) as sent:
            out = ulysses_attention(*mine, causal, scale, group)
            found = torch.autograd.grad(out, mine, grad.chunk(size, 2)[rank])
        name = f"{heads} heads, {key_heads} of keys, causal={causal}"
        near(f"attention, {name}", out, exact.chunk(size, 2)[rank], dtype, group)
        for what, x, full in zip("qkv", found, grads, strict=True):
            near(f"d{what}", x, full.chunk(size, 2)[rank], dtype, group)
        assert all(map(torch.equal, mine, kept)), "inputs written"
        nbytes = 2 * sum(x.nbytes for x in (*mine, out))
        formula = f"(N-1)/N of {nbytes:,} bytes of q, k, v, the output, their gradients"
        sends(sent, formula, (size - 1) / size * nbytes, group)
