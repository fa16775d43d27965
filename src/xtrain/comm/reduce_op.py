"""What each reduce operation does to two partial results."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,  # summed on the way, divided once at the end: `finish`
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def combine(partial: Tensor, incoming: Tensor, op: ReduceOp.RedOpType) -> None:
    """Fold `incoming` into `partial`, in place."""
    COMBINE[op](partial, incoming, out=partial)


def finish(reduced: Tensor, op: ReduceOp.RedOpType, size: int) -> None:
    """Turn the sum over `size` ranks into their average, in place, for AVG only."""
    if op == ReduceOp.AVG:
        reduced.div_(size)
