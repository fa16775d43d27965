"""Decode attention: the query of one new token, and a cache that is cut over ranks.

    each rank     attention over the keys that it has: out, lse
    all-reduce    the largest lse; e^(lse - largest) is the weight of a rank's out
    all-reduce    the sum of weighted outs beside the sum of weights; divide

Computes:   attention of that token over the keys of all ranks, equal on every rank.
Sends:      2(N-1)/N of D + 2 numbers a query head, for a cache of any length.
Leaves out: the new key's way into the cache, a batch of unequal lengths, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, group: Any = None
) -> Tensor:
    """q [B, H, 1, D] of all ranks; k, v [B, G, S, D] of this one, whose S may be 0."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    q = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # heads of one key head are rows
    scores = q @ k.mT * scale  # [B, G, H / G, S]
    lse = scores.logsumexp(-1, keepdim=True)  # -inf without keys: a weight of 0
    out = (scores - lse).exp() @ v

    largest = lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    weight = (lse - largest).exp()
    sums = torch.cat([weight * out, weight], -1)
    dist.all_reduce(sums, group=group)
    out = sums[..., :-1] / sums[..., -1:]
    return out.flatten(1, 2).unsqueeze(2).to(dtype)
