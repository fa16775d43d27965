"""What attention does between its matrices, with all heads or those of one rank.

    q, k, v -> heads -> norms of queries and keys -> rotary positions -> attention

The norms are optional: an RMSNorm over each head, with one weight for all query heads
and one for all key heads.

Sources: Su et al., RoFormer, 2021; Dehghani et al., Scaling Vision Transformers to 22
Billion Parameters, 2023, and the Qwen3 models (norms of queries and keys).

Shapes: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.tensor_parallel.attention_mask import (
    check_window,
    scaled_dot_product_attention,
)
from xtrain.tensor_parallel.rope import RopeScaling, apply_rotary, rope_cos_sin


class RotaryAttention(nn.Module):
    """Causal attention of projected queries, keys and values.

    Args:
        attention: called as `scaled_dot_product_attention` is, with is_causal and
            enable_gqa, and with `window` and `documents` where there are any.
        window: a token sees itself and the `window - 1` before it.

    Attributes:
        q_norm, k_norm: of heads; None unless a subclass makes them.
    """

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        window: int | None = None,
    ):
        super().__init__()
        check_window(window)
        if attention is F.scaled_dot_product_attention:
            attention = scaled_dot_product_attention
        self.head_dim, self.window, self.attention = head_dim, window, attention
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N D] of q [B, S, N D] and k, v [B, S, K D].

        Args:
            positions: [S] or [B, S]; 0, 1, 2, ... unless given. They turn queries and
                keys; the mask goes by the order of tokens.
            documents: [B, S]: a token sees those of its own document.
        """
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        q_BNSD, k_BKSD, v_BKSD = map(self._split_heads, (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q_BNSD, k_BKSD = self.q_norm(q_BNSD), self.k_norm(k_BKSD)
        cos, sin = self._angles(positions, q.dtype)
        limits: dict[str, Any] = {"window": self.window, "documents": documents}
        out_BNSD = self.attention(
            apply_rotary(q_BNSD, cos, sin),
            apply_rotary(k_BKSD, cos, sin),
            v_BKSD,
            is_causal=True,
            enable_gqa=True,
            **{name: limit for name, limit in limits.items() if limit is not None},
        )
        return out_BNSD.transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """At least fp32: 16 bits round large positions to the same number.

        Computed anew in each layer, so that no wrapper casts or broadcasts a table.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return rope_cos_sin(
            positions, self.head_dim, self.rope_theta, self.rope_scaling, wide
        )
