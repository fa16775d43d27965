"""Every rank gets all inputs in rank order."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.ring_all_gather import ring_all_gather


def check(rank: int, size: int) -> None:
    inputs = [randn(250, seed=r) for r in range(size)]
    output = torch.empty(size * 250)
    with Sent() as sent:
        ring_all_gather(output, inputs[rank])
    same("4 inputs of 250 numbers in rank order", output, torch.cat(inputs))
    sends(sent, "(N-1)/N of 4,000 bytes", (size - 1) / size * output.nbytes)

    group, output = dist.new_group([1, 3]), torch.zeros(500)
    if rank in (1, 3):
        ring_all_gather(output, inputs[rank], group)
    expected = torch.cat([inputs[1], inputs[3]]) * (rank in (1, 3))
    same("2 inputs in the group of ranks 1 and 3", output, expected)
