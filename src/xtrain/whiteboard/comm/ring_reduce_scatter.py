"""Reduce-scatter around a ring: partial sums travel, and each rank adds its share.

Computes:   rank r's `output` becomes the sum of all ranks' chunk r of `input`.
Sends:      (N-1)/N of `input` in N-1 messages, all to the right neighbour.
Leaves out: chunks of different sizes, other operations than the sum, strides, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Sum the `input`s and keep this rank's chunk; `input` is not changed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = input.detach().view(size, -1)

    partial = chunks[left]  # chunk c starts behind rank c, so that it ends at rank c
    for step in range(size - 1):
        incoming = torch.empty_like(partial)
        # Both at once: if all sent first, all would wait for a receiver.
        calls = [
            dist.P2POp(dist.isend, partial, group=group, group_peer=right),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        incoming += chunks[(rank - 2 - step) % size]
        partial = incoming
    output.detach().copy_(partial.view(output.shape))
