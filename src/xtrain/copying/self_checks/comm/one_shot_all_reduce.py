"""The sum is the one that a single process adds up."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.one_shot_all_reduce import one_shot_all_reduce


def check(rank: int, size: int) -> None:
    inputs = [randn(1000, seed=r) for r in range(size)]
    tensor = inputs[rank].clone()
    with Sent() as sent:
        one_shot_all_reduce(tensor)
    same("the sum of 4 tensors of 1,000 numbers", tensor, torch.stack(inputs).sum(0))
    sends(sent, "N-1 times 4,000 bytes", (size - 1) * tensor.nbytes)

    group, tensor = dist.new_group([1, 3]), inputs[rank][:7].clone()
    if rank in (1, 3):
        one_shot_all_reduce(tensor, group)
        inputs[rank] = inputs[1] + inputs[3]
    same("the sum of 7 numbers in the group of ranks 1 and 3", tensor, inputs[rank][:7])
