"""What one process gets, causal or not, zigzag or not."""

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
from xtrain.whiteboard.context_parallel.ring_attention_forward import (
    ring_attention_forward,
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
        exact, log = attention(q.double(), k.double(), v.double(), causal, scale)
        given = [x[:, :, mine] for x in (q, k, v)]
        kept = [x.clone() for x in given]
        with Sent(group) as sent:
            out, lse = ring_attention_forward(*given, causal, balance, scale, group)
        name = f"{heads} heads, {key_heads} of keys, causal={causal}, {balance}"
        near(f"attention, {name}", out, exact[:, :, mine], dtype, group)
        wide = torch.promote_types(dtype, torch.float32)
        near("its log-sum-exp", lse, log[:, :, mine], wide, group)
        assert all(map(torch.equal, given, kept)), "inputs written"
        nbytes = 2 * given[1].nbytes
        formula = f"N-1 times {nbytes:,} bytes of K and V"
        sends(sent, formula, (size - 1) * nbytes, group)
