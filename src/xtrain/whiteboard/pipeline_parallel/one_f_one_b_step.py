"""A training step by 1F1B: forward i, then backward i - (p - 1 - rank).

Computes:   the mean loss of the batch, on every rank; `.grad` of this rank's stage.
Sends:      m outputs to the next rank, m gradients to the one before, 16 bytes to all.
Leaves out: overlap, uneven micro-batches, tuples, strides, earlier gradients, checks.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def one_f_one_b_step(
    stage: nn.Module,
    loss_fn: Any,  # (output, target) -> (sum, count)
    inputs: Any,  # of the whole batch, on the first rank
    targets: Any,  # on the last rank; None on the others
    micro_batches: int,
    activation: Tensor,  # of the shape that stages hand on for one micro-batch
    group: Any = None,
) -> Tensor:
    """The rank in the group is the stage; the caller zeroes gradients and steps."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    last = len(ranks) - 1

    def swap(peer: int, sent: Any, receive: bool) -> Any:
        came = torch.empty_like(activation) if receive and 0 <= peer <= last else None
        both = ((dist.isend, sent), (dist.irecv, came))  # at once: neither waits alone
        p2p = [dist.P2POp(f, t, ranks[peer], group) for f, t in both if t is not None]
        for work in dist.batch_isend_irecv(p2p) if p2p else []:
            work.wait()
        return came

    totals = torch.zeros(2, dtype=torch.float64, device=activation.device)
    warm_up, waiting = last - rank, deque[Any]()  # never more than p - rank wait
    x = swap(rank - 1, None, receive=True)
    for i in range(micro_batches + warm_up):
        out = dx = None
        if i < micro_batches:
            x = inputs.chunk(micro_batches)[i] if rank == 0 else x.requires_grad_()
            y = stage(x)
            out = y.detach() if rank < last else None
            if rank == last:
                y, count = loss_fn(y, targets.chunk(micro_batches)[i])
                totals[0] += y.detach()
                totals[1] += count
            waiting.append((x, y))
        dy = swap(rank + 1, out, receive=i >= warm_up)
        if i >= warm_up:
            x, y = waiting.popleft()
            y.backward(dy)  # adds up in .grad
            dx = x.grad
        x = swap(rank - 1, dx, receive=i + 1 < micro_batches)
    dist.broadcast(totals, group=group, group_src=last)  # sum and count of the batch
    for grad in [p.grad for p in stage.parameters() if p.grad is not None]:
        grad /= totals[1]
    return totals[0] / totals[1]
