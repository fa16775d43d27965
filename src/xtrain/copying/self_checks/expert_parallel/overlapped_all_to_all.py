"""Both micro-batches as one after another, and when rows leave and are waited for."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.copying.self_checks.harness import Here, Sent, randn, same, sends

SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    weights = [randn(6, 6, seed=s) for s in (1, 2, 3, 4)]
    done: list[int] = []

    def make(layer: int) -> Any:
        def chunk(i: int, rows: Tensor) -> Tensor:
            done.append(i)
            return (rows @ weights[layer]).tanh() + i + rank

        return chunk

    chunks = [make(layer) for layer in range(4)]
    x = [randn(8, 6, seed=10 * i + rank) for i in (0, 1)]
    expected = []
    for i in (0, 1):  # one after another, each waiting for its rows
        rows = x[i]
        for chunk in chunks:
            arriving = torch.empty_like(rows)
            dist.all_to_all_single(arriving, chunk(i, rows), group=Here.group)
            rows = arriving
        expected.append(rows)
    done.clear()
    with Sent() as sent:
        found = form(x, chunks)
    for i in (0, 1):
        same(f"micro-batch {i} after two layers", found[i], expected[i])
    assert done == [0, 1] * 4  # in turn
    nbytes = 2 * 4 * x[0].nbytes
    sends(sent, "(N-1)/N of what each chunk returns", (size - 1) / size * nbytes)
