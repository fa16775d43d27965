"""Inputs of attention, whole on every rank, and one process's answer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.devices import randn
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.context_parallel.block_attention import TILES

BLOCKS = {"tiles": TILES, "fused": None}  # None: the best kernel of the device


def qkv(
    heads: int, key_heads: int, length: int, seed: int = 11, batch: int = 2
) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, h, length, 6) for h in (heads, key_heads, key_heads, heads)]
    return tuple(randn(*s, generator=generator) for s in shapes)


def visible(
    length: int, causal: bool, window: int | None, documents: Tensor | None
) -> Tensor:
    """The whole mask, [S, S] or [B, 1, S, S]: what no rank of ours ever makes."""
    x, y = torch.arange(length).unsqueeze(-1), torch.arange(length)
    seen = (y <= x) | (not causal)
    if window is not None:
        seen &= y > x - window
    if documents is not None:
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        seen = (seen & same & (documents.unsqueeze(-1) >= 0)).unsqueeze(1)
    return seen


def dense(
    q, k, v, grad, causal: bool, scale: float | None = None,
    window: int | None = None, documents: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and the three gradients, by torch in one process."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(repeats, 1) for t in (k, v))
    mask = None
    if window is not None or documents is not None:
        mask, causal = visible(q.shape[2], causal, window, documents), False
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def distributed(
    name: str,
    heads: int,
    key_heads: int,
    local: int,
    causal: bool,
    balance: str,
    blocks: str,
    scale: float | None,
    ranks: int,
) -> list[float]:
    """The largest error of the output, dq, dk and dv of this rank."""
    q, k, v, grad = qkv(heads, key_heads, local * ranks)
    expected = dense(q, k, v, grad, causal, scale)
    mine = [shard_sequence(t, 2, balance).requires_grad_() for t in (q, k, v)]
    options = {"block_attention": BLOCKS[blocks]}
    if name == "ring":
        out = ring_attention(*mine, causal, balance, scale, **options)
    elif name == "all_gather":
        out = all_gather_attention(*mine, causal, scale, balance=balance, **options)
    else:
        out = ulysses_attention(*mine, causal, scale)
    out.backward(shard_sequence(grad, 2, balance))
    found = [out.detach(), *(t.grad for t in mine)]
    whole = [unshard_sequence(t, 2, balance) for t in found]
    return [(a - b).abs().max().item() for a, b in zip(whole, expected, strict=True)]


def all_cases(cases: list[tuple], ranks: int) -> list[list[float]]:
    return [distributed(*case, ranks) for case in cases]
