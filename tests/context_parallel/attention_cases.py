"""Inputs of attention, whole on every rank, and one process's answer."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.devices import randn
from xtrain.context_parallel import (
    Deal,
    all_gather_attention,
    deal_documents,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)


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


def deal_of(documents: Tensor | None, length: int, ranks: int) -> Deal:
    """One document if there are none."""
    ids = torch.zeros(length, dtype=torch.int64) if documents is None else documents
    return deal_documents(ids, ranks)


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


def attend(
    name: str, q, k, v, causal: bool = True, balance: str = "none",
    scale: float | None = None, group=None, **options,
) -> Tensor:  # fmt: skip
    """Ring, all-gather or Ulysses attention."""
    if name == "ring":
        return ring_attention(q, k, v, causal, balance, scale, group, **options)
    if name == "all_gather":
        options["balance"] = balance
        return all_gather_attention(q, k, v, causal, scale, group, **options)
    options.pop("block_attention", None)
    return ulysses_attention(q, k, v, causal, scale, group, **options)


def errors(attention, whole, expected, cut, join) -> list[float]:
    """The largest error of the output, dq, dk and dv of this rank.

    Args:
        whole: q, k, v and the gradient of the output.
        cut, join: from a whole tensor to this rank's part, and back.
    """
    mine = [cut(t).requires_grad_() for t in whole[:3]]
    out = attention(*mine)
    out.backward(cut(whole[3]))
    found = [out.detach(), *(t.grad for t in mine)]
    return [
        (join(a) - b).abs().max().item() for a, b in zip(found, expected, strict=True)
    ]


def errors_of(
    name: str, whole, causal: bool = True, balance: str = "none",
    scale: float | None = None, group=None, documents: Tensor | None = None, **options,
) -> list[float]:  # fmt: skip
    """`errors` of the attention of this name against one process."""
    expected = dense(*whole, causal, scale, options.get("window"), documents)
    if balance == "dealt":
        balance = deal_of(documents, whole[0].shape[2], dist.get_world_size(group))
    if documents is not None:
        mine = shard_sequence(documents, 1, balance, group)
        options["documents"] = mine.to(torch.int32)
    return errors(
        partial(
            attend, name, causal=causal, balance=balance, scale=scale, group=group,
            **options,
        ),
        whole,
        expected,
        lambda t: shard_sequence(t, 2, balance, group),
        lambda t: unshard_sequence(t, 2, balance, group),
    )  # fmt: skip
