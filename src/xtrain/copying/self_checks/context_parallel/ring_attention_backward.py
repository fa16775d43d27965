"""dq, dk and dv of one process, causal or not, zigzag or not."""

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.context_parallel.ring_attention_backward import (
    ring_attention_backward,
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
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for heads, key_heads, local, causal, scale, balance in (
        (2, 1, 2, True, None, "none"),
        (3, 3, 5, False, 0.3, "none"),
        (6, 2, 10, True, 0.3, "zigzag"),
        (6, 2, 10, False, 0.0, "none"),
        (2, 1, 2, False, 0.3, "zigzag"),
        (2, 2, 4, True, None, "zigzag"),
        (6, 2, 10, True, None, "none"),
    ):
        length = local * size
        q = randn(2, heads, length, 8, seed=1, dtype=dtype)
        k, v = (randn(2, key_heads, length, 8, seed=s, dtype=dtype) for s in (2, 3))
        here, pieces = (torch.arange(length).chunk(n) for n in (size, 2 * size))
        mine = here[rank]
        if balance == "zigzag":
            mine = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
        grad = randn(2, heads, length, 8, seed=4, dtype=dtype)
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v)]
        exact, log = attention(*leaves, causal, scale)
        grads = torch.autograd.grad(exact, leaves, grad.double())
        wide = torch.promote_types(dtype, torch.float32)
        out, lse = exact.detach().to(dtype), log.detach().to(wide)
        given = [x[:, :, mine] for x in (grad, q, k, v, out, lse)]
        kept = [x.clone() for x in given]
        with Sent(group) as sent:
            found = ring_attention_backward(*given, causal, balance, scale, group)
        for what, x, whole in zip("qkv", found, grads, strict=True):
            name = f"d{what}, {heads} heads, causal={causal}, {balance}"
            assert x.dtype == wide, name
            near(name, x.to(dtype), whole[:, :, mine], dtype, group, 1.0)
        assert all(map(torch.equal, given, kept)), "inputs written"
        keys, sums = 2 * given[2].nbytes, 2 * given[2].numel() * wide.itemsize
        formula = f"N-1 times {keys:,} bytes of K, V and N times {sums:,} of dK, dV"
        total = (size - 1) * keys + (size > 1) * size * sums
        sends(sent, formula, total, group)
