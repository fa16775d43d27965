"""Every rank gets its piece from every other, whatever the sizes."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    table = [[2, 0, 1, 5], [3, 2, 0, 0], [0, 0, 0, 1], [4, 1, 0, 0]]  # [from][to]
    rows = [[table[r % 4][c % 4] for c in range(size)] for r in range(size)]
    inputs = [randn(sum(rows[r]), 100, seed=r) for r in range(size)]
    arriving = [row[rank] for row in rows]
    output = torch.empty(sum(arriving), 100)
    with Sent() as sent:
        form(output, inputs[rank], arriving, rows[rank])
    pieces = [t.split(row)[rank] for t, row in zip(inputs, rows, strict=True)]
    same("unequal pieces from every rank", output, torch.cat(pieces), 0)
    away, nbytes = len(inputs[rank]) - rows[rank][rank], 100 * output.itemsize
    sends(sent, "`input` less this rank's own piece", away * nbytes)

    back = torch.empty_like(inputs[rank])
    form(back, output, rows[rank], arriving)
    same("the way back", back, inputs[rank], 0)
    even, other = randn(6 * size, seed=rank), torch.empty(6 * size)
    form(other, even)
    sixths = [randn(6 * size, seed=r).chunk(size)[rank] for r in range(size)]
    same("equal pieces need no list", other, torch.cat(sixths), 0)
