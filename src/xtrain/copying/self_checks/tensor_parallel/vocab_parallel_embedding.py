"""The output has the whole table's bits, the gradient is a quarter of its gradient."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole table on every rank
    full = nn.Embedding(20, 6).double()
    layer = VocabParallelEmbedding(full)
    ids = torch.tensor([[0, 4, 5, 9, 10], [14, 15, 19, 0, 7]])  # each rank's edges
    grad = randn(2, 5, 6, seed=1, dtype=torch.float64)
    y = full(ids)
    y.backward(grad)
    with Sent() as sent:
        out = layer(ids)
        out.backward(grad)
    same("the rows of all ids", out, y, 0)
    part = gradient(full.weight).chunk(size)[rank]
    same("the gradient of a quarter of the table", gradient(layer.weight), part, 1e-12)
    sends(
        sent, f"2(N-1)/N of {y.nbytes:,} bytes of y", 2 * (size - 1) / size * y.nbytes
    )
