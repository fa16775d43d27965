"""Ranks with 3, 4, 5 and 0 tokens: each expert gets what all ranks have for it."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends

SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    tokens = [3, 4, 5, 0, 1, 2, 6, 4][:size]
    x = [randn(n, 6, seed=r) for r, n in enumerate(tokens)]
    experts = [randn(n, 8, seed=50 + r).topk(2)[1] for r, n in enumerate(tokens)]
    with Sent() as sent:
        rows, arrived, _ = form(x[rank], experts[rank], 8)
    each, expected = 8 // size, []
    for expert in range(rank * each, (rank + 1) * each):
        came = [x[r][experts[r].eq(expert).any(-1)] for r in range(size)]
        expected.append(torch.cat(came))
    same("rows by expert, then by rank", rows, torch.cat(expected))
    lengths = torch.tensor([len(e) for e in expected])
    same("how many each of the experts has got", arrived, lengths)
    away = int(experts[rank].div(each, rounding_mode="floor").ne(rank).sum())
    counts, nbytes = 8 - each, 6 * rows.itemsize
    sends(
        sent,
        "E/N counts to each other rank, then the rows whose experts are elsewhere",
        counts * 8 + nbytes * away,
    )
