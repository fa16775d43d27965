"""A training step by GPipe: all micro-batches forward, then all of them backward.

    rank 0  F0 F1 F2 .  .  B0 B1 B2         F: receive x, y = stage(x), send y
    rank 1     F0 F1 F2 B0 B1 B2            B: receive dy, backward, send dx

Computes:   the mean loss of the batch, on every rank; `.grad` of this rank's stage.
Sends:      m outputs to the next rank, m gradients to the one before, 16 bytes to all.
Leaves out: recompute, uneven micro-batches, tuples, fp32 sums of 16-bit gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gpipe_step(
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
    xs = list(inputs.chunk(micro_batches)) if rank == 0 else []
    ys: list[Tensor] = []
    sends: list[Any] = []
    for i in range(micro_batches):
        if rank > 0:
            x = torch.empty_like(activation)
            dist.recv(x, group=group, group_src=rank - 1)
            xs.append(x.requires_grad_())  # a leaf: its gradient is what we send back
        y = stage(xs[i])
        if rank == last:
            y, count = loss_fn(y, targets.chunk(micro_batches)[i])
            totals[0] += y.detach()
            totals[1] += count
        else:  # it travels while the next one is computed
            sends.append(dist.isend(y.detach(), group=group, group_dst=rank + 1))
        ys.append(y)
    for i in range(micro_batches):
        dy = None if rank == last else torch.empty_like(activation)
        if dy is not None:
            dist.recv(dy, group=group, group_src=rank + 1)
        ys[i].backward(dy)  # adds up in .grad
        if rank > 0:
            sends.append(dist.isend(xs[i].grad, group=group, group_dst=rank - 1))
    for send in sends:
        send.wait()
    dist.broadcast(totals, group=group, group_src=last)  # sum and count of the batch
    for grad in [p.grad for p in stage.parameters() if p.grad is not None]:
        grad /= totals[1]
    return totals[0] / totals[1]
