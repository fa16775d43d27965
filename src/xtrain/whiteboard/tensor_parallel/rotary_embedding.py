"""Rotary positions: a query and a key see how far apart they are, and nothing else.

    pair j of a head:  (x[j], x[j + D/2])  turned by  position * theta ** (-2 j / D)

Computes:   queries or keys [B, heads, S, D], each turned by its token's position.
Sends:      nothing: heads are cut over the ranks, and every head turns in the same way.
Leaves out: frequencies stretched for long contexts, a kept table of angles, checks.
"""

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """Positions [S] or [B, S] in the whole sequence, even if x is a slice of it."""
    head_dim = x.shape[-1]
    # At least fp32: 16 bits cannot tell large positions apart.
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.arange(0, head_dim, 2, dtype=wide, device=x.device)
    angles = positions.to(wide).unsqueeze(-1) * theta ** (-pairs / head_dim)
    cos, sin = angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)  # for every head
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
