"""Attention of some queries over keys that come in blocks, and its backward.

    forward    each block's output and log-sum-exp are merged into those so far
    backward   each block gives its part of dq, which is added up here, and of dk and
               dv, which belong to the rank that holds the keys

All sums are kept in at least fp32. What a block is not a whole or a triangle of, comes
as strips of it, each with a mask that exists while the strip is computed.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from xtrain.comm.autocast import without_autocast
from xtrain.context_parallel.balance import Block
from xtrain.context_parallel.block_attention import TILES, BlockAttention, best_for
from xtrain.context_parallel.flash import checked_scale
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

    def add(self, blocks: Sequence[Block], kv: Tensor) -> None:
        """Add what the queries see of some keys and values, [2, B, G, T, D]."""
        for block in blocks:
            out, lse = self._of_block(block, kv)
            new = out.to(wide_dtype(self._q)), lse.to(wide_dtype(self._q))
            rows = block.queries
            if rows == slice(0, self._q.shape[2]):
                self._state = new if self._state is None else merge(self._state, new)
                continue
            self._state = output, total = self._state or self._nothing_seen()
            seen = output[:, :, rows], total[:, :, rows]
            output[:, :, rows], total[:, :, rows] = merge(seen, new)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in q's dtype, and log-sum-exp."""
        out, lse = self._state or self._nothing_seen()
        return out.to(self._q.dtype), lse

    def _of_block(self, block: Block, kv: Tensor) -> tuple[Tensor, Tensor]:
        q, (keys, values) = self._q[:, :, block.queries], kv[:, :, :, block.keys]
        attention, how = kernel_and_mask(self._attention, block, q)
        with without_autocast(q.device.type):
            return attention.forward(q, keys, values, block.causal, self._scale, *how)

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

    def of_blocks(self, blocks: Sequence[Block], kv: Tensor) -> Tensor | None:
        """Add to `dq`; what these queries contribute to the gradients of the keys and
        values, [2, B, G, T, D], or None if they see none of them."""
        total = None
        for block in blocks:
            total = add_up(total, self._of_block(block, kv), block, kv)
        return total

    def _of_block(self, block: Block, kv: Tensor) -> Tensor:
        rows, (keys, values) = block.queries, kv[:, :, :, block.keys]
        grad_out, q, out, lse = (t[:, :, rows] for t in self._of_queries)
        tensors = grad_out, q, keys, values, out, lse
        attention, how = kernel_and_mask(self._attention, block, q)
        with without_autocast(q.device.type):
            dq, dk, dv = attention.backward(*tensors, block.causal, self._scale, *how)
        self.dq[:, :, rows] += dq
        return torch.stack([dk, dv]).to(self.dq.dtype)


def kernel_and_mask(
    attention: BlockAttention, block: Block, q: Tensor
) -> tuple[BlockAttention, tuple[Any, ...]]:
    """What computes a block, and its mask if it has one. Only tiles have dropout."""
    mask = None if block.mask is None else block.mask().to(q.device)
    if block.kept is not None:
        return TILES, (mask, block.kept)
    if mask is None:
        return attention, ()
    return attention if attention.masked else TILES, (mask,)


def add_up(so_far: Tensor | None, part: Tensor, block: Block, kv: Tensor) -> Tensor:
    """The gradients of `kv`, [2, B, G, T, D], with those of one block added."""
    if so_far is None and block.keys == slice(0, kv.shape[3]):
        return part
    if so_far is None:
        so_far = torch.zeros_like(kv, dtype=wide_dtype(kv))
    so_far[:, :, :, block.keys] += part
    return so_far


def sum_of(so_far: Tensor | None, part: Tensor | None, kv: Tensor) -> Tensor:
    """The gradients of `kv` so far and of this rank; what is None adds nothing."""
    if so_far is None:
        return torch.zeros_like(kv, dtype=wide_dtype(kv)) if part is None else part
    return so_far if part is None else so_far.add_(part)


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
        running.add(mask.blocks(0, 0), torch.stack([k, v]))
        out, lse = running.result()
        ctx.mask, ctx.attention, ctx.scale = mask, attention, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Gradients(ctx.attention, grad_out, q, out, lse, ctx.scale)
        kv = torch.stack([k, v])
        dkv = gradients.of_blocks(ctx.mask.blocks(0, 0), kv)
        dk, dv = torch.zeros_like(kv) if dkv is None else dkv.to(k.dtype)
        return None, None, None, gradients.dq.to(q.dtype), dk, dv


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over blocks are kept in: fp32, and float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def last_dim_dense(x: Tensor) -> Tensor:
    """`x`, copied if its last dim has gaps: kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
