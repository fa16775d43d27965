"""A training step by 1F1B: forward i, then backward i - (p - 1 - rank).

    rank 0  F0 F1 | F2 B0 F3 B1 | B2 B3       warm-up | steady state | cool-down
    rank 1  F0 | F1 B0 F2 B1 F3 B2 | B3
    rank 2  F0 B0 F1 B1 F2 B2 F3 B3           the last rank has only steady state

Computes:   the mean loss of the batch, on every rank; `.grad` of this rank's stage.
Sends:      m outputs to the next rank, m gradients to the one before, 16 bytes to all.
Leaves out: overlap, uneven micro-batches, tuples, fp32 sums of 16-bit gradients.
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
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    totals = torch.zeros(2, dtype=torch.float64, device=activation.device)
    waiting = deque[Any]()  # (x, y) between F and B, never more than p - rank of them

    def forward(i: int, x: Any) -> Tensor:
        x = inputs.chunk(micro_batches)[i] if rank == 0 else x.requires_grad_()
        y = stage(x)
        if rank == last:
            y, count = loss_fn(y, targets.chunk(micro_batches)[i])
            totals[0] += y.detach()
            totals[1] += count
        waiting.append((x, y))
        return y.detach()

    def backward(dy: Any) -> Any:
        x, y = waiting.popleft()
        y.backward(dy)  # adds up in .grad
        return x.grad

    def swap(peer: int, sent: Any = None, receive: bool = False) -> Any:
        """Both at once: two neighbours that send first would wait for each other."""
        if not 0 <= peer <= last:
            return None  # the first rank has no rank before it, the last none after it
        came, calls = torch.empty_like(activation), []
        if sent is not None:
            calls.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
        if receive:
            calls.append(dist.P2POp(dist.irecv, came, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return came

    warm_up = min(last - rank, micro_batches)
    for i in range(warm_up):
        y = forward(i, swap(rank - 1, receive=True))
        swap(rank + 1, sent=y)

    x = swap(rank - 1, receive=True) if warm_up < micro_batches else None
    for i in range(warm_up, micro_batches):  # steady state: one forward, one backward
        dy = swap(rank + 1, sent=forward(i, x), receive=True)
        x = swap(rank - 1, sent=backward(dy), receive=i + 1 < micro_batches)

    for _ in range(warm_up):  # cool-down
        dy = swap(rank + 1, receive=True)
        swap(rank - 1, sent=backward(dy))

    dist.broadcast(totals, group=group, group_src=last)  # sum and count of the batch
    for grad in [p.grad for p in stage.parameters() if p.grad is not None]:
        grad /= totals[1]
    return totals[0] / totals[1]
