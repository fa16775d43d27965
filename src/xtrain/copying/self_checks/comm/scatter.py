"""Every rank gets its entry of the root's list, whoever is the root."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    for src in reversed(range(size)):
        inputs = [randn(960, seed=10 * src + r) for r in range(size)]
        tensor = torch.zeros(960)
        with Sent() as sent:
            form(tensor, inputs if rank == src else None, global_ranks()[src])
        same(f"an entry of rank {src}'s list on each rank", tensor, inputs[rank], 0)
    sends(sent, "N-1 tensors from the root", (rank == 0) * (size - 1) * tensor.nbytes)
