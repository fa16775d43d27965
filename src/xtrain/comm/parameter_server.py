r"""All-reduce through one rank: simple, and the first thing to outgrow.

    rank 1 \                    / rank 1
    rank 2 -> server, reduces ->  rank 2
    rank 3 /                    \ rank 3

The server receives N-1 tensors and sends N-1 back, so its link carries N-1 times what
the others' links do.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.p2p import exchange_all
from xtrain.comm.reduce_op import divide_if_average, fold_into


def parameter_server_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place; rank 0 of the group does all the work.

    The server sends N-1 times the tensor, every other rank once.
    """
    rank, size = check_call("parameter_server_all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    if rank == 0:
        incoming = torch.empty_like(flat)
        for worker in range(1, size):
            exchange_all([], [(incoming, worker)], group)
            fold_into(flat, incoming, op)
        divide_if_average(flat, op, size)
        exchange_all([(flat, worker) for worker in range(1, size)], [], group)
    else:
        exchange_all([(flat, 0)], [], group)
        exchange_all([], [(flat, 0)], group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
