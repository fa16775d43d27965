"""One layer of the decoder.

Shapes: B batch, S sequence, H hidden.
"""

from torch import Tensor, nn

from xtrain.expert_parallel import GShardMoE, MoE
from xtrain.expert_parallel.events import ChunkEvent
from xtrain.model.parts import WholeParts


def make_layer(parts: WholeParts, number: int) -> "DecoderLayer":
    """The layer with this number."""
    kind = OverlappedDecoderLayer if parts.sends_copies(number) else DecoderLayer
    return kind(parts, number)


class DecoderLayer(nn.Module):
    """Attention and then SwiGLU or experts, each with a norm before and a residual.

    Args:
        parts: makes the modules.
        number: which layer of the model it is.
    """

    def __init__(self, parts: WholeParts, number: int = 0):
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = parts.attention()
        self.post_attention_layernorm = parts.norm()
        self.mlp = parts.mlp(number)
        self.routes = isinstance(self.mlp, MoE)

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
