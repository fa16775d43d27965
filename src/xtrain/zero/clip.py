"""Clip gradients of which every rank holds a part."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import message_device


@torch.no_grad()
def clip_sharded_grad_norm_(
    gradients: list[Tensor], max_norm: float, group: ProcessGroup | None = None
) -> Tensor:
    """Scale disjoint gradient shards to a norm of at most `max_norm` over all ranks.

    Squares add up, norms do not: each rank sums the squares of its shards, the sums are
    all-reduced, and only then comes the root. Returns the norm before clipping.
    """
    total = torch.zeros((), dtype=torch.float64, device=message_device(group))
    for gradient in gradients:
        total += gradient.double().square().sum().to(total.device)
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    factor = max_norm / (norm.item() + 1e-6)
    if not factor >= 1:  # a NaN reaches every gradient: nobody takes half of a bad step
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
