"""The root gets the sum, whoever it is; the others keep what they have."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.reduce import reduce


def check(rank: int, size: int) -> None:
    inputs = [randn(1000, seed=r) for r in range(size)]
    total = torch.stack(inputs).sum(0)
    for dst in reversed(range(size)):
        tensor = inputs[rank].clone()
        with Sent() as sent:
            reduce(tensor, dst)
        expected = total if rank == dst else inputs[rank]
        same(f"the sum of 4 tensors on rank {dst} alone", tensor, expected)
    sends(sent, "4,000 bytes, the root none", (rank != 0) * tensor.nbytes)
