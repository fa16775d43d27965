"""Two layers that read x: their features are those of the gathered sequence."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.tensor_parallel.ring_all_gather_matmul import (
    ring_all_gather_matmul,
)


def check(rank: int, size: int) -> None:
    x = randn(2, 12, 6, seed=1, dtype=torch.float64)
    weights = [randn(8, 6, seed=s, dtype=torch.float64) for s in (2, 3)]
    rows = [weight.chunk(size)[rank] for weight in weights]
    with Sent() as sent:
        found = ring_all_gather_matmul(x.chunk(size, 1)[rank], rows, 1)
    for number, (y, weight) in enumerate(zip(found, weights, strict=True)):
        whole = x @ weight.mT
        what = f"a quarter of the features of layer {number}, all 12 tokens"
        same(what, y, whole.chunk(size, -1)[rank], 1e-12)
    formula = f"(N-1)/N of {x.nbytes:,} bytes of x"
    sends(sent, formula, (size - 1) / size * x.nbytes)
