"""Both micro-batches as one after another, and when rows leave and are waited for."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.expert_parallel.overlapped_all_to_all import (
    overlapped_all_to_all,
)


def check(rank: int, size: int) -> None:
    weights = [randn(6, 6, seed=s, dtype=torch.float64) for s in (1, 2, 3, 4)]
    done: list[int] = []

    def make(layer: int) -> Any:
        def chunk(i: int, rows: Tensor) -> Tensor:
            done.append(i)
            return (rows @ weights[layer]).tanh() + i + rank

        return chunk

    chunks = [make(layer) for layer in range(4)]
    x = [randn(8, 6, seed=10 * i + rank, dtype=torch.float64) for i in (0, 1)]
    expected = []
    for i in (0, 1):  # one after another, each waiting for its rows
        rows = x[i]
        for chunk in chunks:
            arriving = torch.empty_like(rows)
            dist.all_to_all_single(arriving, chunk(i, rows))
            rows = arriving
        expected.append(rows)
    done.clear()
    with Sent() as sent:
        found = overlapped_all_to_all(x, chunks)
    for i in (0, 1):
        same(f"micro-batch {i} after two layers", found[i], expected[i], 1e-12)
    assert done == [0, 1] * 4  # in turn
    nbytes = 2 * 4 * x[0].nbytes
    formula = f"(N-1)/N of {nbytes:,} bytes: both, after each of 4 chunks"
    sends(sent, formula, (size - 1) / size * nbytes)
