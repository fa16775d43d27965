"""Ring attention, forward: queries stay, keys and values go round the ranks.

    step s    block of queries of rank r and keys of rank r - s, merged into (out, lse)
              meanwhile the keys and values of the next step are on their way

Computes:   attention of this rank's queries over the sequences of all ranks; its lse.
Sends:      N-1 times K and V, to the next rank.
Leaves out: striped balance, tiles inside a block, unequal lengths, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    balance: str = "none",
    scale: float | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """q [B, H, S / N, D], its k and v with G heads; the balance is none or zigzag."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    size, length, dtype = len(ranks), q.shape[-2], q.dtype
    q = q.to(torch.promote_types(dtype, torch.float32)).unflatten(1, (k.shape[1], -1))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    kv = torch.stack([k, v]).unsqueeze(3)  # [2, B, G, 1, S / N, D], as few heads travel
    early = length // 2 if balance == "zigzag" else length
    for owner in [(rank - step) % size for step in range(size)]:
        arriving, works = torch.empty_like(kv), []
        if owner != (rank + 1) % size:  # N - 1 rotations; issued before the block
            after, before = ranks[(rank + 1) % size], ranks[rank - 1]
            send = dist.P2POp(dist.isend, kv, after, group)
            receive = dist.P2POp(dist.irecv, arriving, before, group)
            works = dist.batch_isend_irecv([send, receive])
        # In the whole sequence: of a rank before us, all queries see the early keys;
        # of one behind us, the late queries see all keys (without zigzag none is late).
        rows = (..., slice(early if causal and owner > rank else 0, None), slice(None))
        cols = (..., slice(early if causal and owner < rank else length), slice(None))
        keys, values = kv[cols].to(q.dtype)
        scores = q[rows] @ keys.mT
        if causal and owner == rank:
            scores += torch.full_like(scores, -torch.inf).triu(1)
        total = torch.logaddexp(lse[rows], scores.logsumexp(-1, keepdim=True))
        out[rows] *= (lse[rows] - total).exp()
        out[rows] += (scores - total).exp() @ values
        lse[rows] = total
        for work in works:
            work.wait()
        kv = arriving
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2).squeeze(-1)
