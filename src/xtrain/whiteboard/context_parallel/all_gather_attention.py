"""All-gather attention: own queries, and the keys and values of all ranks at once.

    K, V of each rank -> all-gather -> attention of S / N queries over S keys
    dK, dV of all ranks <- reduce-scatter <- dK, dV of S keys

Computes:   attention over the sequences of all ranks, as if they were one.
Sends:      (N-1)/N of all K and V forward, and of dK and dV in fp32 or wider backward.
Leaves out: balance, overlap, gathering again in backward instead of keeping, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: Any = None,
) -> Tensor:
    """q [B, H, S / N, D]; k, v with H or fewer heads, gathered as they are."""
    keys, values = _Gather.apply(torch.stack([k, v]), group)
    mask, first = None, dist.get_rank(group) * q.shape[2]
    if causal:  # by positions in the whole sequence
        mine = first + torch.arange(q.shape[2], device=q.device)
        mask = torch.arange(keys.shape[2], device=q.device) <= mine.unsqueeze(1)
    return scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        parts = kv.new_empty(size * len(kv), *kv.shape[1:])
        _all_gather(parts, kv, group=group)
        return torch.cat(parts.chunk(size), dim=3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        parts = wide.chunk(dist.get_world_size(ctx.group), dim=3)
        mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(mine, torch.cat(parts), group=ctx.group)
        return mine.to(grad.dtype), None
