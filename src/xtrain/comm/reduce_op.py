"""What each reduce operation does to two partial results."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,  # and `divide_if_average`, once, at the end
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def fold_into(partial: Tensor, incoming: Tensor, op: ReduceOp.RedOpType) -> None:
    """Fold `incoming` into `partial`, in place."""
    COMBINE[op](partial, incoming, out=partial)


def divide_if_average(reduced: Tensor, op: ReduceOp.RedOpType, size: int) -> None:
    """Turn the sum over `size` ranks into their average, in place, for AVG only."""
    if op == ReduceOp.AVG:
        reduced.div_(size)


def reduce_into(output: Tensor, shares: list[Tensor], op: ReduceOp.RedOpType) -> None:
    """Reduce the shares in their order into `output`; fp16 and bf16 add up in fp32.

    `output` may be the first share. Two shares are read and one result is written at
    first: a copy of the first share would be one more pass over memory.
    """
    if len(shares) == 1:
        output.copy_(shares[0])
    elif output.dtype in (torch.float16, torch.bfloat16):
        total = shares[0].float()
        for share in shares[1:]:
            fold_into(total, share.float(), op)
        divide_if_average(total, op, len(shares))
        output.copy_(total)
        return
    else:
        COMBINE[op](shares[0], shares[1], out=output)
        for share in shares[2:]:
            fold_into(output, share, op)
    divide_if_average(output, op, len(shares))


def op_name(op: object) -> str:
    """The name of a reduce operation, for messages; also of what is none."""
    return getattr(op, "name", str(op))
