"""Each rank gets its chunk of the sum that a single process adds up."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.ring_reduce_scatter import ring_reduce_scatter


def check(rank: int, size: int) -> None:
    inputs = [randn(size * 250, seed=r) for r in range(size)]
    output = torch.empty(250)
    with Sent() as sent:
        ring_reduce_scatter(output, inputs[rank])
    expected = torch.stack(inputs).sum(0).chunk(size)[rank]
    same("this rank's chunk of the sum of 4 tensors", output, expected)
    sends(sent, "(N-1)/N of 4,000 bytes", (size - 1) / size * inputs[rank].nbytes)

    group = dist.new_group([1, 3])
    if rank in (1, 3):
        output, expected = torch.empty(500), (inputs[1] + inputs[3]).chunk(2)[rank // 2]
        ring_reduce_scatter(output, inputs[rank], group)
    same("half of the sum in the group of ranks 1 and 3", output, expected)
