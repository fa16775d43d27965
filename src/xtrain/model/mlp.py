"""The SwiGLU half of a layer: silu(gate) * up, and down again.

Source: Shazeer, GLU Variants Improve Transformer, 2020.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.model.config import XtrainConfig


class SwiGLU(nn.Module):
    """Two projections up, one of them a gate, and one down."""

    def __init__(self, config: XtrainConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The gated product through the inner size: [B, S, H] in and out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
