"""Runs behind the page on flash attention: tiles, tensors and products, counted."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.context_parallel import (
    flash_attention_backward,
    flash_attention_forward,
    ring_attention,
)
from xtrain.context_parallel.block_attention import FUSED_CPU, TILES
from xtrain.testing.saved import SavedTensors

from .runs_counted import Counted

flash: Any = importlib.import_module("xtrain.context_parallel.flash")

HEAD_DIM = 16
FAR = 1 << 20


# ---------------------------------------------------------------------- tiles


def tiles_computed(length: int, causal: bool) -> dict[str, list[list[int]]]:
    """[first query, queries, first key, keys] of every tile, forward and backward.

    A score tells its place: it is the key times FAR plus the query.
    """
    index = torch.arange(length, dtype=torch.float64)
    one = torch.ones_like(index)
    q = torch.stack([index, one], -1)[None, None]
    k = torch.stack([one, index * FAR], -1)[None, None]
    found: dict[str, list[list[int]]] = {"forward": [], "backward": []}

    def noting(phase: str, name: str) -> Any:
        function = getattr(flash, name)

        def noted(scores: Tensor, other: Tensor) -> Any:
            rows, columns = scores.shape[-2:]
            key, query = divmod(int(scores[..., -1, 0].item()), FAR)
            found[phase].append([query + 1 - rows, rows, key, columns])
            return function(scores, other)

        return mock.patch.object(flash, name, noted)

    with noting("forward", "softmax_block"):
        out, lse = flash_attention_forward(q, k, q, causal, 1.0)
    with noting("backward", "weights"):
        flash_attention_backward(torch.ones_like(out), q, k, q, out, lse, causal, 1.0)
    return found


# --------------------------------------------------------------------- memory


def qkv(length: int) -> list[Tensor]:
    """q, k and v of one head, and the gradient of the output; each has its memory."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, 1, length, HEAD_DIM
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All scores at once, causal."""
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


def in_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention with autograd: a ring of one rank."""
    return ring_attention(q, k, v, block_attention=TILES)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all scores": naive,
    "tiles": in_tiles,
}


def counted(way: str, length: int) -> dict[str, Any]:
    """Largest tensor and work of forward and of backward, and the bytes that are kept.

    Kept is what autograd saves, each storage once.
    """
    *inputs, grad_out = qkv(length)
    for tensor in inputs:
        tensor.requires_grad_()
    with SavedTensors() as saved, Counted() as forward:
        out = WAYS[way](*inputs)
    with Counted() as backward:
        out.backward(grad_out)
    return {
        "largest": [forward.elements, backward.elements],
        "flops": [forward.flops, backward.flops],
        "kept": saved.nbytes(),
    }


# ------------------------------------------------------------------- equality


def errors(heads: int, key_heads: int, length: int, causal: bool) -> dict[str, Any]:
    """How far tiles are from torch's attention and from its kernel, in float64."""
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> Tensor:
        shape = 2, count, length, HEAD_DIM
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (drawn(h).requires_grad_() for h in (heads, key_heads, key_heads))
    grad_out = drawn(heads)
    right = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=heads != key_heads
    )
    wanted = [right, *torch.autograd.grad(right, (q, k, v), grad_out)]
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = flash_attention_forward(q, k, v, causal)
    found = [out, *flash_attention_backward(grad_out, q, k, v, out, lse, causal)]
    kernel = FUSED_CPU.forward(q, k, v, causal, HEAD_DIM**-0.5)
    return {
        "torch": [apart(a, b) for a, b in zip(found, wanted, strict=True)],
        "kernel": [apart(a, b) for a, b in zip((out, lse), kernel, strict=True)],
    }


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
