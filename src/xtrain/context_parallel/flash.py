"""FlashAttention in blocks: the scores of one tile at a time, never the whole matrix.

    for each tile of queries                      forward keeps out and lse,
        for each tile of keys it sees             N numbers per head beside q, k, v
            S = q k^T scale;  merge into (out, lse)

    for each tile of keys                         backward computes P again
        for each tile of queries that sees it
            P = exp(S - lse)        dV += P^T dO
            dS = P * (dO v^T - D)   dK += dS^T q scale     dQ += dS k scale

D = rowsum(dO * out) stands for what softmax's backward needs of a whole row, which is
why a tile needs nothing of the others. That is also why the same backward serves ring
attention, where the other tiles are on other ranks. Dropout multiplies P by its factors
wherever it meets V or dO; lse, and with it P, is that of all keys.

Grouped keys: each key head serves `heads / key heads` query heads and is not repeated.

Source: Dao, FlashAttention-2, 2023.

Shapes: B batch, H heads, G key heads, S queries, T keys, D head dim.
"""

import torch
from torch import Tensor

from xtrain.context_parallel.mask import Kept, Sees, hide, sees_by, tiles
from xtrain.context_parallel.online_softmax import State, merge, softmax_block, weights


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, tile by tile.

    Args:
        q: [B, H, S, D].
        k, v: [B, G, T, D], G a divisor of H.
        causal: query x sees keys 0 to x.
        scale: of the scores; 1 / sqrt(D) unless given.
        mask: [B or 1, 1, S, T], True where a query sees a key; in place of `causal`.
        kept: dropout's factors of the probabilities, tile by tile.

    Returns:
        out [B, H, S, D] in q's dtype, lse [B, H, S] in at least fp32; a query that sees
        no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes that do not fit.
    """
    return forward_tiles(q, k, v, sees_by(causal, mask), scale, kept)


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in at least fp32, from what forward gave.

    `out` and `lse` may be those of more keys than `k`: then these are the gradients
    that belong to this part of them.
    """
    sees = sees_by(causal, mask)
    return backward_tiles(grad_out, q, k, v, out, lse, sees, scale, kept)


def forward_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Sees,
    scale: float | None = None,
    kept: Kept | None = None,
) -> State:
    """`flash_attention_forward` with any mask; tiles that see nothing are skipped."""
    scale = checked_scale(q, k, v, scale)
    queries = _grouped(q, k)
    out = torch.zeros_like(queries)
    lse = out.new_full(out.shape[:-1], float("-inf"))
    for rows in tiles(q.shape[2]):
        state: State | None = None
        for columns in tiles(k.shape[2]):
            seen = sees(rows, columns)
            if seen is False:
                continue
            scores = queries[..., rows, :] @ _tile(k, columns).mT * scale
            hide(scores, seen)
            factors = None if kept is None else _grouped(kept(rows, columns), k)
            state = merge(state, softmax_block(scores, _tile(v, columns), factors))
        if state is not None:
            out[..., rows, :], lse[..., rows] = state
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def backward_tiles(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sees: Sees,
    scale: float | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_attention_backward` with any mask."""
    scale = checked_scale(q, k, v, scale)
    queries, dO = _grouped(q, k), _grouped(grad_out, k)
    D = (dO * _grouped(out, k)).sum(-1, keepdim=True)
    lse = lse.unflatten(1, queries.shape[1:3]).unsqueeze(-1).to(queries.dtype)
    dq = torch.zeros_like(queries)
    dk, dv = (torch.zeros_like(_wide(t)) for t in (k, v))
    for columns in tiles(k.shape[2]):
        keys, values = _tile(k, columns), _tile(v, columns)
        for rows in tiles(q.shape[2]):
            seen = sees(rows, columns)
            if seen is False:
                continue
            scores = queries[..., rows, :] @ keys.mT * scale
            hide(scores, seen)
            P = weights(scores, lse[..., rows, :])
            dP, kept_P = dO[..., rows, :] @ values.mT, P
            if kept is not None:
                factors = _grouped(kept(rows, columns), k)
                dP, kept_P = dP * factors, P * factors
            dS = P * (dP - D[..., rows, :]) * scale
            dq[..., rows, :] += dS @ keys
            dk[:, :, columns] += (dS.mT @ queries[..., rows, :]).sum(2)
            dv[:, :, columns] += (kept_P.mT @ dO[..., rows, :]).sum(2)
    return dq.flatten(1, 2), dk, dv


def checked_scale(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """The scale to use; ValueError unless the shapes are those of attention."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} are not [batch, "
            "heads, sequence, head dim] with heads a multiple of the key heads"
        )
    return q.shape[3] ** -0.5 if scale is None else scale


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, S, D] as [B, G, H / G, S, D] in at least fp32."""
    return _wide(x).unflatten(1, (k.shape[1], -1))


def _tile(x: Tensor, columns: slice) -> Tensor:
    """[B, G, 1, columns, D]: every query head of a group uses it."""
    return _wide(x[:, :, columns]).unsqueeze(2)
