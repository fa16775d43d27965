"""All-reduce in one step: everyone sends everything to everyone.

For a few kilobytes latency is all that counts, and nothing takes fewer steps than one.
The price is volume: each rank sends N-1 times the tensor.

This is the one file of `xtrain.comm` that calls a torch collective: a single
`all_to_all_single` hands all N-1 messages to the backend at once, which beats N-1
separate sends.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.reduce_op import reduce_into


def one_shot_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place: one step, N-1 times the tensor sent.

    All ranks add in rank order, so all get the same bits. fp16 and bf16 add in fp32.
    """
    _, size = check_call("one_shot_all_reduce", group, tensor, op=op)
    copies = tensor.detach().reshape(-1).expand(size, -1).contiguous()
    theirs = torch.empty_like(copies)
    dist.all_to_all_single(theirs, copies, group=group)
    shares = theirs.view(size, *tensor.shape).unbind()
    reduce_into(tensor.detach(), list(shares), op)
