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
    rank, size, dtype = dist.get_rank(group), dist.get_world_size(group), q.dtype
    q = q.to(torch.promote_types(dtype, torch.float32)).unflatten(1, (k.shape[1], -1))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    kv = torch.stack([k, v]).unsqueeze(3)  # [2, B, G, 1, S / N, D], as few heads travel

    for step in range(size):
        owner = (rank - step) % size  # of the keys that are here now
        arriving, works = torch.empty_like(kv), []
        if step < size - 1:  # N - 1 rotations; issued before the block is computed
            works = _send_right_recv_left(kv, arriving, group)

        visible: Any = slice(None), slice(None)  # all queries see all keys
        if causal and owner != rank:
            visible = _visible(owner < rank, balance, q.shape[-2] // 2)
        if visible is not None:
            rows, cols = ((..., part, slice(None)) for part in visible)
            _merge(out[rows], lse[rows], q[rows], kv[cols], causal and owner == rank)

        for work in works:
            work.wait()
        kv = arriving
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2).squeeze(-1)


def _visible(earlier: bool, balance: str, half: int) -> tuple[slice, slice] | None:
    """Which queries see which keys of an earlier or a later rank; None: none do."""
    if balance == "none":  # runs of the sequence: all of an earlier one, or nothing
        return (slice(None), slice(None)) if earlier else None
    # Zigzag, rank r has pieces r and 2N-1-r: all our queries come between the pieces of
    # an earlier rank; our late queries, and only they, come after those of a later one.
    return (slice(None), slice(half)) if earlier else (slice(half, None), slice(None))


def _merge(out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, diagonal: bool) -> None:
    """Add one block to (out, lse), in place: both parts shrink to the new sum."""
    keys, values = kv.to(q.dtype)
    scores = q @ keys.mT
    if diagonal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    total = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
    out.mul_((lse - total).exp()).add_((scores - total).exp() @ values)
    lse.copy_(total)


def _send_right_recv_left(kv: Tensor, arriving: Tensor, group: Any) -> list[Any]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    calls = [
        dist.P2POp(dist.isend, kv, group=group, group_peer=right),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=left),
    ]
    return dist.batch_isend_irecv(calls)
