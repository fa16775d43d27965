"""Whether ranks hold a whole tensor in a state that `dataflow` declares."""

from collections.abc import Sequence

import torch
from torch import Tensor

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def holds(state: str, held: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether `held`, by rank, is the whole tensor in this state."""
    kind, *rest = state.split()
    copies = int(rest[2]) if len(rest) > 1 else 1
    if kind == "split":
        slices = whole.chunk(len(held) // copies, int(rest[0]))
        return all(same(one, slices[r // copies]) for r, one in enumerate(held))
    if kind == "replicated":
        return all(same(one, whole) for one in held)
    if any(one.shape != held[0].shape for one in held):
        return False
    stacked = torch.stack(list(held))
    if kind == "largest":  # of different ones: equal ones are replicated
        different = not same(stacked.amin(0), whole)
        return different and same(stacked.amax(0), whole)
    if not rest:
        return same(stacked.sum(0), whole)
    sums = stacked.unflatten(0, (-1, copies)).sum(1)
    return all(map(same, sums, whole.chunk(len(sums), int(rest[0]))))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for the order of sums."""
    return one.shape == other.shape and torch.allclose(one, other, **CLOSE)
