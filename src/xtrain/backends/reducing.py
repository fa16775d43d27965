"""Adding up the ranks' shares of a tensor."""

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from xtrain.comm.reduce_op import COMBINE, combine, finish

BLOCK_BYTES = 256 << 10  # reduced at a time: stays in a core's own cache


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
            combine(total, share.float(), op)
        finish(total, op, len(shares))
        output.copy_(total)
        return
    else:
        COMBINE[op](shares[0], shares[1], out=output)
        for share in shares[2:]:
            combine(output, share, op)
    finish(output, op, len(shares))


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def pieces(flat: Tensor, nbytes: int) -> list[Tensor]:
    """Cut a tensor into pieces of at most `nbytes`; an empty one stays one piece."""
    return list(flat.split(max(1, nbytes // flat.element_size())))
