"""What a tensor of a cut module is: found out by comparing numbers with the dense one.

    replicated       every rank has the dense tensor
    split D          rank r has slice r of dim D
    split D by R     R ranks after one another have the same slice of dim D
    partial          the sum over ranks is the dense tensor
    partial D by R   the sum over R ranks after one another is a slice of dim D
    largest          the elementwise maximum over ranks is the dense tensor

Numbers are random, so no two of these can be mistaken for one another. Only elements in
order are compared, not shapes: a collective may be handed a flat view, or the slices of
a dim stacked one after the other.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def state_of(held: Sequence[Tensor], dense: Tensor) -> str | None:
    """What `held`, by rank, is of the dense tensor; None if it has nothing to do."""
    ranks = len(held)
    flat = [tensor.double().flatten() for tensor in held]
    for whole in orders(dense.double(), ranks):
        if all(same(one, whole) for one in flat):
            return "replicated"
        if flat[0].numel() == whole.numel():
            if same(torch.stack(flat).sum(0), whole):
                return "partial"
            if same(torch.stack(flat).amax(0), whole):
                return "largest"
    for copies in (n for n in range(1, ranks) if ranks % n == 0):
        for dim, slices in cuts(dense.double(), ranks // copies):
            by = f" by {copies}" if copies > 1 else ""
            if all(same(flat[r], slices[r // copies]) for r in range(ranks)):
                return f"split {dim}{by}"
            if copies > 1 and flat[0].numel() == slices[0].numel():
                sums = torch.stack(flat).unflatten(0, (-1, copies)).sum(1)
                if all(map(same, sums, slices)):
                    return f"partial {dim}{by}"
    return None


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for the order of sums."""
    return one.shape == other.shape and torch.allclose(one, other, **CLOSE)


def orders(dense: Tensor, ranks: int) -> Iterator[Tensor]:
    """Its elements as they lie, and with the slices of a dim one after the other."""
    yield dense.flatten()
    for _, slices in cuts(dense, ranks):
        yield torch.cat(slices)


def cuts(dense: Tensor, parts: int) -> Iterator[tuple[int, list[Tensor]]]:
    """For each dim that divides, the elements of its slices."""
    for dim, length in enumerate(dense.shape):
        if length % parts == 0:
            yield dim, [part.flatten() for part in dense.chunk(parts, dim)]
