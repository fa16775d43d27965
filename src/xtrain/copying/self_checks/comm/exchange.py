"""Every rank gets what its left neighbour sent."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, incoming = randn(960, seed=rank), torch.empty(960)
    with Sent() as sent:
        form(outgoing, global_ranks()[right], incoming, global_ranks()[left])
    same("960 numbers from the left neighbour", incoming, randn(960, seed=left), 0)
    nbytes = outgoing.nbytes
    sends(sent, "one tensor", nbytes * (size > 1))
