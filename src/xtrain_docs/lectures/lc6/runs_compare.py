"""Ring, all-gather and Ulysses attention on real ranks: bytes and tensors of each."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import xtrain.backends  # noqa: F401  (its sockets say what a collective has sent)
from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.testing.saved import SavedTensors

from .runs_counted import Counted

ATTENTION = {
    "ring": ring_attention,
    "all_gather": all_gather_attention,
    "ulysses": ulysses_attention,
}
HEAD_DIM = 8


def inputs(heads: int, key_heads: int, tokens: int) -> list[Tensor]:
    """q, k, v of the whole sequence and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, h, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
        for h in (heads, key_heads, key_heads, heads)
    ]


def sent(way: str, heads: int, key_heads: int, local: int) -> list[int]:
    """Bytes this rank sends in float32: forward without its check, and backward."""
    size = rank_and_size(None)[1]
    group = dist.new_group(backend="xtrain-socket")
    tensors = [t.float() for t in inputs(heads, key_heads, local * size)]
    q, k, v, grad = (shard_sequence(t, 2) for t in tensors)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with CommLedger() as forward:
        out = ATTENTION[way](q, k, v, group=group)
    with CommLedger() as backward:
        out.backward(grad)
    dist.destroy_process_group(group)
    return [
        sum(e.nbytes or 0 for e in ledger.events if moves(e))
        for ledger in (forward, backward)
    ]


def moves(event: Any) -> bool:
    """Does this rank send q, k, v or gradients? The check of the call is no such."""
    return event.kind != "recv" and event.op != "allreduce"


def error(way: str, heads: int, key_heads: int, local: int) -> float:
    """The largest error of output and gradients against one process, in float64."""
    size = rank_and_size(None)[1]
    whole = inputs(heads, key_heads, local * size)
    mine = [shard_sequence(t, 2) for t in whole]
    found = with_gradients(ATTENTION[way], *mine)
    expected = with_gradients(one_process, *whole)
    return max(
        float((unshard_sequence(a, 2) - b).abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def with_gradients(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> list[Tensor]:
    """Output, dQ, dK, dV."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = attention(q, k, v)
    out.backward(grad)
    gradients = [t.grad for t in (q, k, v) if t.grad is not None]
    return [out.detach(), *gradients]


def tensors_of(way: str, heads: int, key_heads: int, local: int) -> list[int]:
    """In float32: bytes of q, kept for backward, of the largest tensor in each pass."""
    size = rank_and_size(None)[1]
    whole = [t.float() for t in inputs(heads, key_heads, local * size)]
    q, k, v, grad = (shard_sequence(t, 2) for t in whole)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with SavedTensors() as saved, Counted() as forward:
        out = ATTENTION[way](q, k, v)
    with Counted() as backward:
        out.backward(grad)
    nbytes = q.numel() * q.element_size()
    return [nbytes, saved.nbytes(), forward.nbytes, backward.nbytes]
