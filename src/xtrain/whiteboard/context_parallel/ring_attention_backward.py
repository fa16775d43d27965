"""Ring attention, backward: K and V go round once more, and dK and dV with them.

Computes:   dq, dk, dv of this rank's q, k, v in at least fp32, from what forward gave.
Sends:      N-1 times K and V, and N times dK and dV: the last hop brings them home.
Leaves out: striped balance, tiles inside a block, unequal lengths, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = True,
    balance: str = "none",
    scale: float | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of the forward, and its out and lse, of the keys of all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    size, length, given = len(ranks), q.shape[-2], (q, out, grad_out, lse.unsqueeze(-1))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, out, dO, lse = (x.to(lse.dtype).unflatten(1, (k.shape[1], -1)) for x in given)
    kv = torch.stack([k, v]).unsqueeze(3)  # [2, B, G, 1, S / N, D]
    D, dq = (dO * out).sum(-1, keepdim=True), torch.zeros_like(q)

    def rotate(x: Tensor) -> Any:
        arriving, after = torch.empty_like(x), ranks[(rank + 1) % size]
        both = (dist.isend, x, after), (dist.irecv, arriving, ranks[rank - 1])
        p2p = [dist.P2POp(f, t, peer, group) for f, t, peer in both]
        return (arriving, dist.batch_isend_irecv(p2p)) if size > 1 else (x, [])

    dkv, home = torch.zeros_like(kv, dtype=q.dtype), list[Any]()
    early = length // 2 if balance == "zigzag" else length
    for owner in [(rank - step) % size for step in range(size)]:
        next_kv, works = rotate(kv) if owner != (rank + 1) % size else (kv, [])
        rows = (..., slice(early if causal and owner > rank else 0, None), slice(None))
        cols = (..., slice(early if causal and owner < rank else length), slice(None))
        keys, values = kv[cols].to(q.dtype)
        scores = q[rows] @ keys.mT * scale
        if causal and owner == rank:
            scores += torch.full_like(scores, -torch.inf).triu(1)
        P = (scores - lse[rows]).exp()  # of all keys, also those of other ranks
        dS = P * (dO[rows] @ values.mT - D[rows]) * scale
        dq[rows] += dS @ keys
        [work.wait() for work in home]  # what the ranks before us have added up
        dkv[cols] += torch.stack([dS.mT @ q[rows], P.mT @ dO[rows]]).sum(3, True)
        dkv, home = rotate(dkv)
        [work.wait() for work in works]
        kv = next_kv
    [work.wait() for work in home]
    return dq.flatten(1, 2), *dkv.squeeze(3)
