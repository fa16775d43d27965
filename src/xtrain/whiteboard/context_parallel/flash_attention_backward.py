"""FlashAttention backward: a tile of probabilities is computed again from its lse.

    P = e^(S - lse)        dV += P^T dO        D = rowsum(dO * out), once a query
    dS = P * (dO V^T - D)  dQ += dS K          dK += dS^T Q

Computes:   dq, dk and dv in at least fp32, from what the forward has kept.
Sends:      nothing; with the out and lse of all keys, a rank may bring some of them.
Leaves out: dropout, masks other than causal, one kernel for all of it, checks.
"""

import torch
from torch import Tensor

TILE = 128


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [B, G, T, D] with G heads that divide those of q are not repeated."""
    wide, groups = torch.promote_types(q.dtype, torch.float32), (k.shape[1], -1)
    q, out, dO = (x.to(wide).unflatten(1, groups) for x in (q, out, grad_out))
    k, v = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    lse = lse.to(wide).unflatten(1, groups).unsqueeze(-1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    D = (dO * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, k.shape[-2], TILE):
        cols = (..., slice(j, j + TILE), slice(None))
        for i in range(0, q.shape[-2], TILE):
            if causal and j >= i + TILE:
                continue  # these queries come before every key of the tile
            rows = (..., slice(i, i + TILE), slice(None))
            scores = q[rows] @ k[cols].mT * scale
            if causal:  # query i + x sees keys up to i + x
                scores += torch.full_like(scores, -torch.inf).triu(i - j + 1)
            P = (scores - lse[rows]).exp()  # of all keys: no maximum, no sum
            dS = P * (dO[rows] @ v[cols].mT - D[rows]) * scale
            dq[rows] += dS @ k[cols]
            dk[cols] += (dS.mT @ q[rows]).sum(2, keepdim=True)
            dv[cols] += (P.mT @ dO[rows]).sum(2, keepdim=True)
    return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)
