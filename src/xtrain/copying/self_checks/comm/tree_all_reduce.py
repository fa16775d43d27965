"""The sum is the one that a single process adds up."""

from typing import Any

from xtrain.copying.self_checks.comm.sums import check_sum, children


def check(form: Any, rank: int, size: int) -> None:
    share = children(rank, size) + (rank > 0)
    check_sum(form, rank, size, "ceil(log2 N) by the root", share)
