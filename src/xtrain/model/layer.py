"""One layer of the decoder.

Shapes: B batch, S sequence, H hidden.
"""

from torch import Tensor, nn

from xtrain.expert_parallel import GShardMoE
from xtrain.expert_parallel.events import Event
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

    def forward(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class OverlappedDecoderLayer(DecoderLayer):
    """One whose experts are on several ranks, as `ForwardChunks` cuts it.

    Called as a module it is a `DecoderLayer`.
    """

    events: list[Event] | None = None

    def attention(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        """The first half, with its norm and residual."""
        return x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)

    @property
    def norm(self) -> nn.Module:
        return self.post_attention_layernorm

    @property
    def moe(self) -> GShardMoE:
        return self.mlp  # type: ignore[return-value]
