"""FlashAttention forward: a tile of scores at a time, and never the whole matrix.

    a tile of queries stays; tiles of keys come     scores  [TILE, TILE]
    out, lse <- merged with each of them            kept for backward: out and lse

Computes:   attention [B, H, S, D], and the log-sum-exp of the scores [B, H, S].
Sends:      nothing; ring attention does this with the tiles of other ranks.
Leaves out: dropout, masks other than causal, one kernel for all of it, checks.
"""

import torch
from torch import Tensor

TILE = 128


def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Keys [B, G, T, D] with G heads that divide those of q are not repeated."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, G, H / G, S, D]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    k, v = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    out, lse = torch.empty_like(q), torch.empty_like(q[..., :1])
    for i in range(0, q.shape[-2], TILE):
        q_tile = q[..., i : i + TILE, :]
        state = torch.zeros_like(q_tile)
        seen = torch.full_like(q_tile[..., :1], -torch.inf)  # lse of the keys so far
        for j in range(0, k.shape[-2], TILE):
            if causal and j >= i + TILE:
                break  # these keys come after every query of the tile
            scores = q_tile @ k[..., j : j + TILE, :].mT
            if causal:  # query i + x sees keys up to i + x
                scores += torch.full_like(scores, -torch.inf).triu(i - j + 1)
            total = torch.logaddexp(seen, scores.logsumexp(-1, keepdim=True))
            p = (scores - total).exp()
            state = state * (seen - total).exp() + p @ v[..., j : j + TILE, :]
            seen = total
        out[..., i : i + TILE, :], lse[..., i : i + TILE, :] = state, seen
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2).squeeze(-1)
