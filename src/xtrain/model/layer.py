"""One layer of the decoder: attention, then SwiGLU or experts.

Source of SwiGLU: Shazeer, GLU Variants Improve Transformer, 2020.

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads, D head size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.expert_parallel import GShardMoE, MoE
from xtrain.expert_parallel.events import ChunkEvent
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions; N / K query heads share a key head.

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


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: XtrainConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The gated product through the inner size: [B, S, H] in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and then SwiGLU or experts, each with a norm before and a residual.

    `PlainModules.layer` makes one.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: nn.Module,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
    ):
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp
        self.routes = isinstance(mlp, MoE)

    def forward(
        self, x_BSH: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """`mask` [B, S] is False for padding, which routers leave out."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)
        given = (mask,) if self.routes and mask is not None else ()
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH), *given)


class OverlappedDecoderLayer(DecoderLayer):
    """One whose experts are on several ranks, as `ForwardChunks` cuts it.

    Called as a module it is a `DecoderLayer`.
    """

    events: list[ChunkEvent] | None = None

    def attention(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        """The first half, with its norm and residual."""
        return x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)

    @property
    def norm(self) -> nn.Module:
        return self.post_attention_layernorm

    @property
    def moe(self) -> GShardMoE:
        return self.mlp  # type: ignore[return-value]
