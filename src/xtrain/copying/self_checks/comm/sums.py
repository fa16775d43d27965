"""Shared by the all-reduces: every rank gets the sum that one process adds up."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check_sum(form: Any, rank: int, size: int, formula: str, share: float) -> None:
    """`share` is how often this rank sends the tensor."""
    for numel in (960, 7, 1):
        inputs = [randn(numel, seed=r) for r in range(size)]
        tensor = inputs[rank].clone()
        with Sent() as sent:
            form(tensor)
        total = torch.stack(inputs).sum(0)
        same(f"the sum of {size} tensors of {numel} numbers", tensor, total)
        if numel == 960:
            sends(sent, formula, share * tensor.nbytes)


def children(rank: int, size: int) -> int:
    """How many ranks a rank has below it in the binomial tree of rank 0."""
    powers = (2**i for i in range(size.bit_length()))
    return sum(rank % (2 * p) == 0 and rank + p < size for p in powers)
