"""One layer of the decoder: attention, then SwiGLU or experts.

Source of SwiGLU: Shazeer, GLU Variants Improve Transformer, 2020.

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.expert_parallel import GShardMoE, MoE
from xtrain.expert_parallel.events import ChunkEvent
from xtrain.model.config import XtrainConfig
from xtrain.tensor_parallel.mlp import gated
from xtrain.tensor_parallel.norm import RMSNorm
from xtrain.tensor_parallel.rotary_attention import RotaryAttention


class Attention(RotaryAttention):
    """Causal self-attention with rotary positions; N / K query heads share a key head.

    Args:
        attention: called as `scaled_dot_product_attention` is, with queries, keys and
            values, is_causal and enable_gqa, and with `window` and `documents` where
            there are any.
        window: a token sees itself and the `window - 1` before it.
    """

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        window: int | None = None,
    ):
        rope = config.rope_theta, config.rope_scaling
        super().__init__(config.head_dim, *rope, attention, window)
        self.config = config
        hidden, head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * head_dim
        keys = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self, x_BSH: Tensor, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Attend over the sequence: [B, S, H] in and out; positions [S] or [B, S]."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (projection(x_BSH) for projection in projections)
        return self.o_proj(self.attend(q, k, v, positions, documents))


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
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


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
        self,
        x_BSH: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """`mask` [B, S] is False for padding, which routers leave out."""
        x_BSH = self.with_attention(x_BSH, positions, documents)
        given = (mask,) if self.routes and mask is not None else ()
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH), *given)

    def with_attention(
        self, x_BSH: Tensor, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """The first half, with its norm and residual."""
        given = positions, *([] if documents is None else [documents])
        return x_BSH + self.self_attn(self.input_layernorm(x_BSH), *given)


class OverlappedDecoderLayer(DecoderLayer):
    """One whose experts are on several ranks, as `ForwardChunks` cuts it.

    Called as a module it is a `DecoderLayer`.
    """

    events: list[ChunkEvent] | None = None

    @property
    def attention(self) -> Callable[..., Tensor]:
        return self.with_attention

    @property
    def norm(self) -> nn.Module:
        return self.post_attention_layernorm

    @property
    def moe(self) -> GShardMoE:
        return self.mlp  # type: ignore[return-value]
