"""Part of a tile to three tiles, with as many key heads and with fewer."""

import torch
from torch import Tensor

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.context_parallel.flash_attention_backward import (
    TILE,
    flash_attention_backward,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one process."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    for heads, key_heads, length, causal, scale in (
        (2, 1, 1, True, None),
        (3, 3, TILE - 1, False, 0.3),
        (2, 1, TILE, True, 0.3),
        (6, 2, 2 * TILE + 3, True, None),
        (6, 2, 2 * TILE + 3, False, 0.3),
    ):
        q = randn(2, heads, length, 8, seed=1, dtype=dtype)
        k, v = (randn(2, key_heads, length, 8, seed=s, dtype=dtype) for s in (2, 3))
        grad = randn(2, heads, length, 8, seed=4, dtype=dtype)
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v)]
        exact, log = attention(*leaves, causal, scale)
        grads = torch.autograd.grad(exact, leaves, grad.double())
        wide = torch.promote_types(dtype, torch.float32)
        out, lse = exact.detach().to(dtype), log.detach().to(wide)
        with Sent(group) as sent:
            found = flash_attention_backward(grad, q, k, v, out, lse, causal, scale)
        for what, x, whole in zip("qkv", found, grads, strict=True):
            name = f"d{what}, {length} tokens, causal={causal}"
            assert x.dtype == wide, name
            near(name, x.to(dtype), whole, dtype, group, 1.0)
        sends(sent, "nothing", 0, group)
