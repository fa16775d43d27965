"""The root gets every rank's tensor, whoever it is."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.gather import gather


def check(rank: int, size: int) -> None:
    inputs = [randn(1000, seed=r) for r in range(size)]
    for dst in reversed(range(size)):
        pieces = [torch.zeros(1000) for _ in inputs] if rank == dst else None
        with Sent() as sent:
            gather(inputs[rank], pieces, dst)
        found = torch.stack(inputs if pieces is None else pieces)
        same(f"4 tensors on rank {dst}, in rank order", found, torch.stack(inputs))
    sends(sent, "4,000 bytes, the root none", (rank != 0) * inputs[rank].nbytes)
