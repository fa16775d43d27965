"""Ulysses: swap a cut sequence for cut heads, attend as on one device, swap back.

    [B, H, S / N, D]  -- all-to-all -->  [B, H / N, S, D]  plain attention
    [B, H, S / N, D]  <-- all-to-all --  [B, H / N, S, D]

Computes:   attention over the sequences of all ranks; any plain attention fits inside.
Sends:      (N-1)/N of q, k, v and the output forward, and of their gradients backward.
Leaves out: zigzag (its work is balanced), heads that N does not divide, checks.
"""

from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: Any = None,
) -> Tensor:
    """q [B, H, S / N, D], H a multiple of N; k, v with H or fewer heads."""
    # Fewer key heads than ranks are repeated, and autograd adds up their gradients.
    copies = lcm(k.shape[1], dist.get_world_size(group)) // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (_Swap.apply(x, 1, 2, group) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return _Swap.apply(out, 2, 1, group)


class _Swap(torch.autograd.Function):
    """Cut dim `cut` into a part for each rank, join what comes along `joined`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, joined: int, group: Any) -> Tensor:
        ctx.dual = joined, cut, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=group)
        return torch.cat(came.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Swap.apply(grad, *ctx.dual), None, None, None
