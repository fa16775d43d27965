"""One layer of the decoder.

Shapes: B batch, S sequence, H hidden.
"""

from torch import Tensor, nn

from xtrain.model.parts import WholeParts


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before and a residual around it."""

    def __init__(self, parts: WholeParts):
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = parts.attention()
        self.post_attention_layernorm = parts.norm()
        self.mlp = parts.mlp()

    def forward(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))
