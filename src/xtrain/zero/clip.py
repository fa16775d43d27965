"""Clip gradients of which every rank holds a part."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@torch.no_grad()
def clip_sharded_grad_norm_(
    gradients: list[Tensor], max_norm: float, group: ProcessGroup | None = None
) -> Tensor:
    """Scale disjoint gradient shards to a norm of at most `max_norm` over all ranks.

    Squares add up, norms do not: each rank sums the squares of its shards, the sums are
    all-reduced, and only then comes the root. Returns the norm before clipping.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += gradient.double().square().sum()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
