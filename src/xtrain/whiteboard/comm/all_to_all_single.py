"""All-to-all of the rows of one tensor, unequal numbers of rows included.

Computes:   piece j of `input` goes to rank j and stands at this rank's place there.
Sends:      `input` less this rank's own piece, in N-1 messages, all at once.
Leaves out: finding out how many rows arrive, strided tensors, checks.
"""

import torch.distributed as dist
from torch import Tensor


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send `input_split_sizes[j]` rows to rank j; without sizes, even pieces."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    leaving = _pieces(input.detach(), input_split_sizes, size)
    arriving = _pieces(output.detach(), output_split_sizes, size)
    arriving[rank].copy_(leaving[rank])

    calls = []
    for step in range(1, size):  # each begins with its neighbour: no rank is flooded
        to, source = (rank + step) % size, (rank - step) % size
        calls += [
            dist.P2POp(dist.isend, leaving[to], group=group, group_peer=to),
            dist.P2POp(dist.irecv, arriving[source], group=group, group_peer=source),
        ]
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()


def _pieces(tensor: Tensor, sizes: list[int] | None, size: int) -> tuple[Tensor, ...]:
    return tensor.tensor_split(size) if sizes is None else tensor.split(sizes)
