"""Every rank gets its entry of the root's list, whoever is the root."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.scatter import scatter


def check(rank: int, size: int) -> None:
    for src in reversed(range(size)):
        inputs = [randn(1000, seed=10 * src + r) for r in range(size)]
        tensor = torch.zeros(1000)
        with Sent() as sent:
            scatter(tensor, inputs if rank == src else None, src)
        same(f"an entry of rank {src}'s list on each rank", tensor, inputs[rank])
    sends(sent, "4,000 bytes to each other rank", (rank == 0) * 3 * tensor.nbytes)
