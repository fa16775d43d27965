"""Ring attention, backward: K and V go round once more, and dK and dV with them.

Computes:   dq, dk, dv of this rank's q, k, v in at least fp32, from what forward gave.
Sends:      N-1 times K and V, and N times dK and dV: the last hop returns them.
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
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = q, out, grad_out, lse.unsqueeze(-1)
    q, out, dO, lse = (x.to(lse.dtype).unflatten(1, (k.shape[1], -1)) for x in given)
    kv = torch.stack([k, v]).unsqueeze(3)  # [2, B, G, 1, S / N, D]
    D, dq = (dO * out).sum(-1, keepdim=True), torch.zeros_like(q)
    dkv, sums_works = torch.zeros_like(kv, dtype=q.dtype), list[Any]()

    for step in range(size):
        owner = (rank - step) % size  # of the keys that are here now
        next_kv, works = _rotate(kv, group) if step < size - 1 else (kv, [])  # issue

        visible: Any = slice(None), slice(None)  # all queries see all keys
        if causal and owner != rank:
            visible = _visible(owner < rank, balance, q.shape[-2] // 2)
        if visible is not None:
            rows, cols = ((..., part, slice(None)) for part in visible)
            keys, values = kv[cols].to(q.dtype)
            scores = q[rows] @ keys.mT * scale
            if causal and owner == rank:
                scores += torch.full_like(scores, -torch.inf).triu(1)
            P = (scores - lse[rows]).exp()  # of all keys, also those of other ranks
            dS = P * (dO[rows] @ values.mT - D[rows]) * scale
            dq[rows] += dS @ keys
            mine = torch.stack([dS.mT @ q[rows], P.mT @ dO[rows]]).sum(3, keepdim=True)

        for work in sums_works:  # what the ranks before us have added up
            work.wait()
        if visible is not None:
            dkv[cols] += mine
        dkv, sums_works = _rotate(dkv, group)  # N hops: the last one returns it
        for work in works:
            work.wait()
        kv = next_kv
    for work in sums_works:
        work.wait()
    return dq.flatten(1, 2), *dkv.squeeze(3)


def _visible(earlier: bool, balance: str, half: int) -> tuple[slice, slice] | None:
    """Which of our queries see which keys of a rank; zigzag: half of either of them."""
    if balance == "none":  # runs of the sequence: all of an earlier one, or nothing
        return (slice(None), slice(None)) if earlier else None
    return (slice(None), slice(half)) if earlier else (slice(half, None), slice(None))


def _rotate(x: Tensor, group: Any) -> tuple[Tensor, list[Any]]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return x, []
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
    recv = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size)
    return arriving, dist.batch_isend_irecv([send, recv])
