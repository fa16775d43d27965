"""Two micro-batches: one computes while the rows of the other are on their way.

    micro-batch 0   attention | dispatch  | experts  | combine | attention | ...
    micro-batch 1             | attention | dispatch | experts | combine   | ...

Computes:   the rows of both after all chunks, an all-to-all after each of them.
Sends:      (N-1)/N of what each chunk returns; all but the last under a chunk.
Leaves out: unequal numbers of rows, whose exchange would wait; backward, checks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def overlapped_all_to_all(
    inputs: Sequence[Tensor],
    chunks: Sequence[Callable[[int, Tensor], Tensor]],
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Chunk(micro-batch, rows) returns as many rows for each rank, in their order.

    In an MoE these are attention with the router, whose rows are dispatched, and the
    experts, whose rows are combined, in turn.
    """
    first, second = inputs
    ready, flying = [first, second], None
    for chunk in chunks:
        for i in (0, 1):
            rows = chunk(i, ready[i]).contiguous()  # the other one's rows are flying
            if flying is not None:
                ready[1 - i] = _wait(*flying)  # as late as possible
            arriving = torch.empty_like(rows)
            work = dist.all_to_all_single(arriving, rows, group=group, async_op=True)
            flying = work, arriving, rows  # rows live until they have left
    if flying is not None:
        ready[1] = _wait(*flying)
    return ready[0], ready[1]


def _wait(work: Any, arriving: Tensor, rows: Tensor) -> Tensor:
    work.wait()
    return arriving
