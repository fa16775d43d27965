"""Causal attention with its heads cut over the ranks; few key heads are repeated.

Computes:   `full(x)` on every rank; backward, this rank's part of each dW, all of dX.
Sends:      2(N-1)/N of y forward, of x backward, and of dW_k and dW_v if K < N.
Leaves out: biases, slices of the sequence, a group for each of the K key heads, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.functional import scaled_dot_product_attention as attend


class TensorParallelAttention(nn.Module):
    """Parts of a module with q_proj, k_proj, v_proj and o_proj, all without bias."""

    def __init__(self, full: Any, group: Any = None, *, head_dim: int):
        super().__init__()
        self.group, self.head_dim = group, head_dim
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        for name, dim in {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}.items():
            heads = getattr(full, name).weight.detach().unflatten(dim, (-1, head_dim))
            replicas = max(1, self.size // heads.shape[dim])  # ranks with the same head
            parts = heads.repeat_interleave(replicas, dim).chunk(self.size, dim)
            weight = nn.Parameter(parts[self.rank].flatten(dim, dim + 1).clone())
            if replicas > 1:
                weight.register_hook(lambda grad, r=replicas: self._sum_over(r, grad))
            self.register_parameter(name, weight)

    def _sum_over(self, replicas: int, grad: Tensor) -> Tensor:
        heads = grad.new_zeros(self.size // replicas, *grad.shape)
        heads[self.rank // replicas] = grad  # a part, of this rank's queries
        return _Sum.apply(heads, True, self.group)[self.rank // replicas]

    def forward(self, x: Tensor, rotate: Any = lambda heads: heads) -> Tensor:
        x = _Sum.apply(x, False, self.group)  # f: the one sum of dX, of q, k and v
        *weights, o = self.parameters()
        split = [linear(x, w).unflatten(-1, (-1, self.head_dim)) for w in weights]
        q, k, v = (part.transpose(1, 2) for part in split)  # [B, heads, S, D]
        out = attend(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return _Sum.apply(linear(out.transpose(1, 2).flatten(2), o), True, self.group)


class _Sum(torch.autograd.Function):  # g: sum now. f: sum in backward, g's dual
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool, group: Any) -> Tensor:
        ctx.dual = not now, group
        if not now:
            return x.view_as(x)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, *ctx.dual), None, None
