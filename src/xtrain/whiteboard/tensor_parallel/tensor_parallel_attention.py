"""Causal attention with its heads cut over the ranks; few key heads are repeated.

    x -> f -> q, k, v: columns, whole heads -> attention -> o: rows -> g -> y
    whole     split: this rank's heads                                  whole

Computes:   `full(x)` on every rank; backward, this rank's part of each dW, all of dX.
Sends:      2(N-1)/N of y forward, of x backward, and of dW_k and dW_v if K < N.
Leaves out: biases, slices of the sequence, a group for each of the K key heads, checks.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class TensorParallelAttention(nn.Module):
    """Parts of a module with q_proj, k_proj, v_proj and o_proj, all without bias."""

    def __init__(self, full: Any, group: Any = None, *, head_dim: int):
        super().__init__()
        self.group, self.head_dim = group, head_dim
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.q_proj = self._my_heads(full.q_proj, dim=0)
        self.k_proj = self._my_heads(full.k_proj, dim=0)
        self.v_proj = self._my_heads(full.v_proj, dim=0)
        self.o_proj = self._my_heads(full.o_proj, dim=1)

    def _my_heads(self, full: nn.Linear, dim: int) -> nn.Parameter:
        heads = full.weight.detach().unflatten(dim, (-1, self.head_dim))
        replicas = max(1, self.size // heads.shape[dim])  # ranks with the same head
        parts = heads.repeat_interleave(replicas, dim).chunk(self.size, dim)
        weight = nn.Parameter(parts[self.rank].flatten(dim, dim + 1).clone())
        if replicas > 1:
            weight.register_hook(partial(self._sum_over_replicas, replicas))
        return weight

    def _sum_over_replicas(self, replicas: int, grad: Tensor) -> Tensor:
        head = self.rank // replicas
        heads = grad.new_zeros(self.size // replicas, *grad.shape)
        heads[head] = grad  # a part, of this rank's queries
        return _AllReduceIdentity.apply(heads, self.group)[head]

    def forward(self, x: Tensor, rotate: Any = lambda heads: heads) -> Tensor:
        x = _IdentityAllReduce.apply(x, self.group)  # f, once for q, k and v
        q = rotate(self._heads(F.linear(x, self.q_proj)))
        k = rotate(self._heads(F.linear(x, self.k_proj)))
        v = self._heads(F.linear(x, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = F.linear(out.transpose(1, 2).flatten(2), self.o_proj)  # a part of each y
        return _AllReduceIdentity.apply(y, self.group)  # g

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] to [B, heads, S, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _IdentityAllReduce(torch.autograd.Function):
    """f: each rank has used x for other heads, so each has a part of dX."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduceIdentity.apply(grad, ctx.group), None


class _AllReduceIdentity(torch.autograd.Function):
    """g: y is the sum, and every part of a sum has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _IdentityAllReduce.apply(grad, ctx.group), None
