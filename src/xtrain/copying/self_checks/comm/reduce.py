"""The root gets the sum, whoever it is; the others keep what they have."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    inputs = [randn(960, seed=r) for r in range(size)]
    total = torch.stack(inputs).sum(0)
    for dst in reversed(range(size)):
        tensor = inputs[rank].clone()
        with Sent() as sent:
            form(tensor, global_ranks()[dst])
        expected = total if rank == dst else inputs[rank]
        same(f"the sum of {size} tensors on rank {dst} alone", tensor, expected)
    sends(sent, "one tensor from each rank but the root", (rank != 0) * tensor.nbytes)
