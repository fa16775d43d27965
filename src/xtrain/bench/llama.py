"""A small Llama-like model, for races that need a training step.

    tokens [B, S] -> embedding -> layers x (attention, SwiGLU) -> norm -> head -> loss

RMSNorm before each half of a layer, rotary positions, half as many key and value heads
as query heads. It is nobody's product: it only has the shape of what people train, and
it has no buffers, so that no wrapper has to broadcast any.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, KV_HEADS = 4, 2
VOCABULARY = 512
WIDTH_STEP = 32  # head dimensions in steps of 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers of the model, and the batch that each rank trains on."""

    layers: int
    batch: int
    sequence: int


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped heads."""

    def __init__(self, width: int):
        super().__init__()
        self.head = width // HEADS
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, KV_HEADS * self.head, bias=False)
        self.value = nn.Linear(width, KV_HEADS * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        batch, sequence, width = x.shape

        def heads(linear: nn.Linear) -> Tensor:
            return linear(x).view(batch, sequence, -1, self.head).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            rotate(heads(self.query), turn),
            rotate(heads(self.key), turn),
            heads(self.value),
            is_causal=True,
            enable_gqa=True,
        )
        return self.output(out.transpose(1, 2).reshape(batch, sequence, width))


class Layer(nn.Module):
    """Attention and SwiGLU, each with a norm before and a residual around it."""

    def __init__(self, width: int):
        super().__init__()
        hidden = hidden_width(width)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """The model; `forward` returns the mean loss of a batch of tokens."""

    def __init__(self, width: int, shape: Shape, device: str = "cpu"):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.turn = turns(shape.sequence, width // HEADS, device)
        self.to(device)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def turns(sequence: int, head: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [S, head / 2]."""
    rates = 10_000.0 ** (-torch.arange(0, head, 2, device=device) / head)
    angles = torch.outer(torch.arange(sequence, device=device), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: turn each pair of elements by its angle."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def hidden_width(width: int) -> int:
    """Of SwiGLU: about 8/3 of the width."""
    return -(-8 * width // 3 // WIDTH_STEP) * WIDTH_STEP


def parameters_for(width: int, layers: int) -> int:
    """How many parameters a model of this width has."""
    attention = 2 * width * width + 2 * width * width * KV_HEADS // HEADS
    layer = attention + 3 * width * hidden_width(width) + 2 * width
    return layers * layer + 2 * VOCABULARY * width + width


def width_for(nbytes: int, layers: int) -> int:
    """The widest model whose float32 weights take at most `nbytes` (one at least)."""
    width = WIDTH_STEP
    while 4 * parameters_for(width + WIDTH_STEP, layers) <= nbytes:
        width += WIDTH_STEP
    return width
