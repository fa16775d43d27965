"""A training step of residual MLPs on a mesh of pipeline, data and tensor ranks.

    pipeline 0   data 0   tensor 0 | tensor 1     a stage: y = x + down gelu(up x), ...
                 data 1   tensor 0 | tensor 1     `up` is cut by rows, `down` by columns
        |  y, dy
    pipeline 1   data 0   tensor 0 | tensor 1     the batch is cut over data ranks alone
                 data 1   tensor 0 | tensor 1

Computes:   the mean loss of all data ranks, on every rank; `.grad` of its slices.
Sends:      m times y, dy, 4(T-1)/T y an MLP, 2 the first; 2(D-1)/D of the weights.
Leaves out: 1F1B, overlap of the sums, clipping, uneven slices and micro-batches.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _Sum(torch.autograd.Function):
    """Over tensor ranks: of outputs in forward, or of input gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_backward: bool) -> Tensor:
        ctx.group, ctx.in_backward = group, in_backward
        y = x.clone()
        if not in_backward:
            dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = dy.clone()
        if ctx.in_backward:
            dist.all_reduce(dx, group=ctx.group)
        return dx, None, None


def mesh_training_step(
    mlps: list[tuple[Tensor, Tensor]],  # of this stage: up [F/T, H], down [H, F/T]
    loss_fn: Any,  # (output, target) -> (sum, count)
    inputs: Any,  # [B, H] of this data rank, on all ranks of its stages and slices
    targets: Tensor,  # [B, ...], likewise
    micro_batches: int,
    pipeline_group: Any,
    data_group: Any,
    tensor_group: Any,
) -> Tensor:
    """GPipe over the stages; the caller zeroes gradients and steps."""
    rank, last = dist.get_rank(pipeline_group), dist.get_world_size(pipeline_group) - 1
    totals = torch.zeros(2, dtype=torch.float64, device=inputs.device)
    xs, ys = [*inputs.chunk(micro_batches)], []
    sends: list[Any] = []
    for i, target in enumerate(targets.chunk(micro_batches)):
        if rank > 0:
            xs[i] = torch.empty_like(xs[i])
            dist.recv(xs[i], group=pipeline_group, group_src=rank - 1)
            xs[i].requires_grad_()  # a leaf: its gradient goes back
        y = xs[i]
        for up, down in mlps:
            hidden = F.gelu(F.linear(_Sum.apply(y, tensor_group, True), up))
            y = y + _Sum.apply(F.linear(hidden, down), tensor_group, False)
        if rank < last:
            sends += [dist.isend(y.detach(), group=pipeline_group, group_dst=rank + 1)]
        else:
            y, count = loss_fn(y, target)
            totals += torch.stack([y.detach(), count]).double()
        ys.append(y)
    for x, y in zip(xs, ys, strict=True):
        dy = None if rank == last else torch.empty_like(y)
        if dy is not None:
            dist.recv(dy, group=pipeline_group, group_src=rank + 1)
        y.backward(dy)  # adds up in .grad
        if rank > 0:
            sends += [dist.isend(x.grad, group=pipeline_group, group_dst=rank - 1)]
    for send in sends:
        send.wait()
    dist.broadcast(totals, group=pipeline_group, group_src=last)
    dist.all_reduce(totals, group=data_group)  # tensor ranks have the same sums
    for grad in [w.grad for pair in mlps for w in pair if w.grad is not None]:
        dist.all_reduce(grad, group=data_group)  # of copies of this slice
        grad /= totals[1]
    return totals[0] / totals[1]
