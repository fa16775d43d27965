"""Clip gradients of which every rank holds a part."""

from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from xtrain.comm.checks import message_device, rank_and_size


@torch.no_grad()
def clip_sharded_grad_norm_(
    gradients: list[Tensor],
    max_norm: float,
    group: ProcessGroup | None = None,
    counts: list[bool] | None = None,
) -> Tensor:
    """Scale disjoint gradient shards to a norm of at most `max_norm` over all ranks.

    Squares add up, norms do not: each rank sums the squares of its shards, the sums are
    all-reduced, and only then comes the root. Returns the norm before clipping. What
    every rank has for `max_norm` travels along: they must give the same.

    Args:
        counts: for each gradient whether this rank adds its squares; all unless given.
            What several ranks hold alike counts on one of them, and all scale it.
    """
    rank, size = rank_and_size(group)
    numbers = torch.zeros(1 + size, dtype=torch.float64, device=message_device(group))
    chosen = gradients if counts is None else compress(gradients, counts)
    norm = norm_of(list(chosen))
    if gradients and gradients[0].is_meta:  # shapes alone: a large norm, no limits
        numbers[0] = 1e12
    else:
        numbers[0], numbers[1 + rank] = norm.to(numbers).square(), max_norm
    if size > 1:
        dist.all_reduce(numbers, group=group)
    limits = numbers[1:].tolist()
    if not all(limit == limits[0] >= 0 for limit in limits):
        raise ValueError(
            f"max_norm must be the same on all ranks, and not negative; by rank: "
            f"{limits}"
        )
    norm = numbers[0].sqrt()
    factor = max_norm / (norm.item() + 1e-6)
    # a NaN reaches every gradient: all ranks take the same bad step
    if gradients and not factor >= 1:
        torch._foreach_mul_(gradients, factor)
    return norm


def norm_of(gradients: list[Tensor]) -> Tensor:
    """In at least fp32; in float64 if the squares are outside the range of fp32."""
    wide = [g.float() if g.dtype.itemsize < 4 else g for g in gradients]
    norm = get_total_norm(wide)
    if not (norm.is_meta or 1e-12 < norm < 1e15):
        norm = get_total_norm([g.double() for g in gradients])
    return norm
