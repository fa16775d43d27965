"""Attention of some queries over keys that come in blocks, and its backward.

    forward    each block's output and log-sum-exp are merged into those so far
    backward   each block gives its part of dq, which is added up here, and of dk and
               dv, which belong to the rank that holds the keys

All sums are kept in at least fp32. A block that is a whole or a triangle is computed by
a kernel, any other by tiles, for which only the mask of one tile exists at a time.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from xtrain.comm.autocast import without_autocast
from xtrain.context_parallel.balance import Block
from xtrain.context_parallel.block_attention import BlockAttention, best_for
from xtrain.context_parallel.flash import backward_tiles, checked_scale, forward_tiles
from xtrain.context_parallel.online_softmax import merge
from xtrain.context_parallel.sequence_mask import SequenceMask


class RunningAttention:
    """The attention of some queries over keys that come in blocks.

    Args:
        q: [B, H, S, D].
    """

    def __init__(self, attention: BlockAttention, q: Tensor, scale: float):
        self._attention, self._scale = attention, scale
        self._q = last_dim_dense(q)
        self._state: tuple[Tensor, Tensor] | None = None

    def add(self, block: Block | None, kv: Tensor) -> None:
        """Add what the queries see of a block of keys and values, [2, B, G, T, D]."""
        if block is None:
            return
        out, lse = self._of_block(block, kv)
        new = out.to(wide_dtype(self._q)), lse.to(wide_dtype(self._q))
        rows = block.queries
        if rows == slice(0, self._q.shape[2]):
            self._state = new if self._state is None else merge(self._state, new)
            return
        self._state = output, total = self._state or self._nothing_seen()
        seen = output[:, :, rows], total[:, :, rows]
        output[:, :, rows], total[:, :, rows] = merge(seen, new)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in q's dtype, and log-sum-exp."""
        out, lse = self._state or self._nothing_seen()
        return out.to(self._q.dtype), lse

    def _of_block(self, block: Block, kv: Tensor) -> tuple[Tensor, Tensor]:
        q, (keys, values) = self._q[:, :, block.queries], kv[:, :, :, block.keys]
        with without_autocast(q.device.type):
            if block.sees is not None:
                return forward_tiles(q, keys, values, block.sees, self._scale)
            return self._attention.forward(q, keys, values, block.causal, self._scale)

    def _nothing_seen(self) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(self._q, dtype=wide_dtype(self._q))
        return out, out.new_full(out.shape[:-1], float("-inf"))


class Gradients:
    """The backward of `RunningAttention`, block by block.

    Attributes: `dq`, the sum so far.
    """

    def __init__(
        self,
        attention: BlockAttention,
        grad_out: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ):
        self._attention, self._scale = attention, scale
        self._of_queries = *map(last_dim_dense, (grad_out, q, out)), lse
        self.dq = torch.zeros_like(q, dtype=wide_dtype(q))

    def of_block(self, block: Block | None, kv: Tensor) -> Tensor | None:
        """Add to `dq`; what these queries contribute to the gradients of the keys and
        values that they see, [2, B, G, block's keys, D]."""
        if block is None:
            return None
        rows, (keys, values) = block.queries, kv[:, :, :, block.keys]
        grad_out, q, out, lse = (t[:, :, rows] for t in self._of_queries)
        tensors = grad_out, q, keys, values, out, lse
        with without_autocast(q.device.type):
            if block.sees is not None:
                dq, dk, dv = backward_tiles(*tensors, block.sees, self._scale)
            else:
                dq, dk, dv = self._attention.backward(
                    *tensors, block.causal, self._scale
                )
        self.dq[:, :, rows] += dq
        return torch.stack([dk, dv]).to(self.dq.dtype)


def add_up(
    so_far: Tensor | None, part: Tensor | None, block: Block | None, kv: Tensor
) -> Tensor:
    """The gradients of `kv`, [2, B, G, T, D], with those of one block added."""
    whole = block is not None and block.keys == slice(0, kv.shape[3])
    if so_far is None and whole and part is not None:
        return part
    if so_far is None:
        so_far = torch.zeros_like(kv, dtype=wide_dtype(kv))
    if block is not None and part is not None:
        so_far[:, :, :, block.keys] += part
    return so_far


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that is an error under `create_graph`.

    Torch's `once_differentiable` raises only if the incoming gradient requires grad,
    so it would silently ignore a penalty on the gradient.
    """

    @wraps(backward)
    def checked(ctx: Any, grad_out: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention over a cut sequence has no second derivative, so its "
                "backward does not run under create_graph=True"
            )
        return backward(ctx, grad_out)

    return checked


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: SequenceMask, scale: float | None = None
) -> Tensor:
    """Attention of q [B, H, S, D] over k, v [B, G, T, D] with the mask of one rank."""
    scale = checked_scale(q, k, v, scale)
    return _MaskedAttention.apply(mask, best_for(q), scale, q, k, v)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask: SequenceMask,
        attention: BlockAttention,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        running = RunningAttention(attention, q, scale)
        running.add(mask.block(0, 0), torch.stack([k, v]))
        out, lse = running.result()
        ctx.mask, ctx.attention, ctx.scale = mask, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        block, kv = ctx.mask.block(0, 0), torch.stack([k, v])
        dk, dv = add_up(None, gradients.of_block(block, kv), block, kv).to(k.dtype)
        return None, None, None, gradients.dq.to(q.dtype), dk, dv


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over blocks are kept in: fp32, and float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def last_dim_dense(x: Tensor) -> Tensor:
    """`x`, copied if its last dim has gaps: kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
