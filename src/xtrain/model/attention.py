"""Causal self-attention with rotary positions and grouped key/value heads.

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin


class Attention(nn.Module):
    """Queries meet the keys before them; N / K query heads share each key head.

    Args:
        attention: called as `scaled_dot_product_attention` is, with queries, keys and
            values, is_causal and enable_gqa. Its mask goes by the order of tokens,
            `positions` only turn queries and keys.
    """

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
    ):
        super().__init__()
        self.config = config
        self.attention = attention
        hidden, head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * head_dim
        keys = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)

    def forward(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        """Attend over the sequence: [B, S, H] in and out; positions [S] or [B, S]."""
        q_BNSD = self._split_heads(self.q_proj(x_BSH))
        k_BKSD = self._split_heads(self.k_proj(x_BSH))
        v_BKSD = self._split_heads(self.v_proj(x_BSH))
        cos, sin = self._angles(positions, x_BSH.dtype)
        out_BNSD = self.attention(
            apply_rotary(q_BNSD, cos, sin),
            apply_rotary(k_BKSD, cos, sin),
            v_BKSD,
            is_causal=True,
            enable_gqa=True,
        )
        return self.o_proj(out_BNSD.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """At least fp32: in 16 bits large positions could not be told apart.

        Computed anew in each layer, so that no wrapper casts or broadcasts a table.
        """
        config = self.config
        wide = torch.promote_types(dtype, torch.float32)
        return rope_cos_sin(
            positions, config.head_dim, config.rope_theta, config.rope_scaling, wide
        )
