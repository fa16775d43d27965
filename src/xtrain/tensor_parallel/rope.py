"""Rotary positions: each pair of elements of a head turns with its position.

    pair j of a head:  (x[j], x[j + D/2])  turned by  position * theta ** (-2 j / D)

The score of a query and a key then depends on the difference of their positions only.
Which elements make a pair is a convention: this one, the halves, is that of Llama
checkpoints in Hugging Face's layout.

Sources: Su et al., RoFormer, 2021; the Llama 3.1 models (frequency scaling).

Shapes: B batch, N heads, S sequence, D head size.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xtrain.plan.checks import require_positive, require_whole


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary positions (rope_type llama3).

    Args:
        factor: how many times slower the slow frequencies turn.
        low_freq_factor: what turns at most this often in the original length is slow.
        high_freq_factor: what turns at least this often in it stays as it is.
        original_max_position_embeddings: the sequence length before stretching.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_positive(name, getattr(self, name))
        require_whole(
            "original_max_position_embeddings", self.original_max_position_embeddings
        )
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}"
            )


def rope_cos_sin(
    positions: Tensor,
    head_dim: int,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [*positions.shape, head_dim / 2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's: slow ones divided by `factor`, fast ones kept, a ramp in between.

    What counts is how often a pair turns within the original sequence length.
    """
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rotary(x_BNSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of elements by its angle; 16-bit inputs are turned in fp32."""
    wide = x_BNSD.to(torch.promote_types(x_BNSD.dtype, cos.dtype))
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # the same for all heads
    turned: Tensor = _Turn.apply(wide, cos, sin)
    return turned.to(x_BNSD.dtype)


class _Turn(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin); backward turns by the same angles back.

    Written by hand it makes fewer passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        turned = x * torch.cat([cos, cos], dim=-1)
        (a, b), (to_a, to_b) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
        to_a.addcmul_(b, sin, value=-1)
        to_b.addcmul_(a, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Turn.apply(grad, cos, -sin), None, None
