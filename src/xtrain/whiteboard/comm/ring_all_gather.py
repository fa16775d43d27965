"""All-gather around a ring: each rank passes on what it received last.

Computes:   every rank's `output` becomes all `input`s, one after the other.
Sends:      (N-1)/N of `output` in N-1 messages, all to the right neighbour.
Leaves out: inputs of different sizes, strided tensors, checks.
"""

import torch.distributed as dist
from torch import Tensor


def ring_all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Collect every rank's `input` in `output`, in rank order."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = output.detach().view(size, -1)
    chunks[rank].copy_(input.detach().view(-1))

    for step in range(size - 1):
        passed_on, arriving = chunks[(rank - step) % size], chunks[(left - step) % size]
        # Both at once: if all sent first, all would wait for a receiver.
        calls = [
            dist.P2POp(dist.isend, passed_on, group=group, group_peer=right),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
