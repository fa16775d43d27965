"""A row layer's output, summed over the ranks: each keeps its slice of the tokens."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.tensor_parallel.ring_matmul_reduce_scatter import (
    ring_matmul_reduce_scatter,
)


def check(rank: int, size: int) -> None:
    x = randn(2, 12, 8, seed=1, dtype=torch.float64)
    weight = randn(6, 8, seed=2, dtype=torch.float64)
    columns, features = weight.chunk(size, 1)[rank], x.chunk(size, -1)[rank]
    with Sent() as sent:
        y = ring_matmul_reduce_scatter(features, columns, 1)
    whole = x @ weight.mT
    same("a quarter of the tokens, all features", y, whole.chunk(size, 1)[rank], 1e-12)
    formula = f"(N-1)/N of {whole.nbytes:,} bytes of y"
    sends(sent, formula, (size - 1) / size * whole.nbytes)
