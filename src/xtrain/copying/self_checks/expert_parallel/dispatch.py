"""Ranks with 3, 4, 5 and 0 tokens: each expert gets what all ranks have for it."""

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.expert_parallel.dispatch import dispatch


def check(rank: int, size: int) -> None:
    tokens = [3, 4, 5, 0]
    x = [randn(n, 6, seed=r) for r, n in enumerate(tokens)]
    experts = [randn(n, 8, seed=50 + r).topk(2)[1] for r, n in enumerate(tokens)]
    with Sent() as sent:
        rows, counts, _ = dispatch(x[rank], experts[rank], 8)
    expected = []
    for expert in (2 * rank, 2 * rank + 1):
        came = [x[r][experts[r].eq(expert).any(-1)] for r in range(size)]
        expected.append(torch.cat(came))
    same("rows by expert, then by rank", rows, torch.cat(expected))
    lengths = torch.tensor([len(e) for e in expected])
    same("how many each of the experts has got", counts, lengths)
    away = int(experts[rank].div(2, rounding_mode="floor").ne(rank).sum())
    formula = "6 counts of 8 bytes, and 24 bytes for each row of another rank"
    sends(sent, formula, 6 * 8 + 24 * away)
