"""The root gets every rank's tensor, whoever it is."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    inputs = [randn(960, seed=r) for r in range(size)]
    everyone = torch.stack(inputs)
    for dst in reversed(range(size)):
        pieces = [torch.zeros(960) for _ in inputs] if rank == dst else None
        with Sent() as sent:
            form(inputs[rank], pieces, global_ranks()[dst])
        found = everyone if pieces is None else torch.stack(pieces)
        same(f"{size} tensors on rank {dst}, in rank order", found, everyone, 0)
    nbytes = inputs[rank].nbytes
    sends(sent, "one tensor from each rank but the root", (rank != 0) * nbytes)
