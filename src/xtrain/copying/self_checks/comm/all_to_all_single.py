"""Every rank gets its piece from every other, whatever the sizes."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.all_to_all_single import all_to_all_single


def check(rank: int, size: int) -> None:
    rows = [[2, 0, 1, 5], [3, 2, 0, 0], [0, 0, 0, 1], [4, 1, 0, 0]]  # [from][to]
    inputs = [randn(sum(rows[r]), 100, seed=r) for r in range(size)]
    arriving = [row[rank] for row in rows]
    output = torch.empty(sum(arriving), 100)
    with Sent() as sent:
        all_to_all_single(output, inputs[rank], arriving, rows[rank])
    pieces = [t.split(row)[rank] for t, row in zip(inputs, rows, strict=True)]
    same("unequal pieces from every rank", output, torch.cat(pieces))
    own = rows[rank][rank]
    sends(sent, "rows of 400 bytes, its own not", (len(inputs[rank]) - own) * 400)

    back = torch.empty_like(inputs[rank])
    all_to_all_single(back, output, rows[rank], arriving)
    same("the way back", back, inputs[rank])
