"""Every rank gets the root's tensor, whoever is the root."""

from typing import Any

from xtrain.copying.self_checks.comm.sums import children
from xtrain.copying.self_checks.harness import Sent, global_ranks, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    for src in reversed(range(size)):
        tensor = randn(960, seed=rank)
        with Sent() as sent:
            form(tensor, global_ranks()[src])
        same(f"960 numbers of rank {src}", tensor, randn(960, seed=src), 0)
    sends(sent, "the root ceil(log2 N) of them", children(rank, size) * tensor.nbytes)
