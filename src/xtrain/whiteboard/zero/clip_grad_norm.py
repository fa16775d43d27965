"""Gradient clipping when every rank holds a shard of the gradients.

    squares of own shards -> sum on this rank -> all-reduce -> root -> one common factor

Computes:   the norm of all gradients on all ranks; scales them down to `max_norm`.
Sends:      2(N-1)/N of one float64: squares add up over the ranks, norms do not.
Leaves out: other norms than the Euclidean one, and whether max_norm is the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_grad_norm(
    gradients: list[Tensor], max_norm: float, group: Any = None
) -> Tensor:
    """Scale disjoint shards in place; the norm before that, the same on every rank."""
    device = gradients[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)  # 1e20 squared fits
    for gradient in gradients:
        total += gradient.double().square().sum()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # also for NaN: then no rank keeps half of a bad step
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
