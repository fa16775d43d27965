"""Rows that two ranks swap come home, and each token gets its weighted sum."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends

SIZES = (4, 8)


def check(form: Any, rank: int, size: int) -> None:
    # Rank r has expert r. Its token t went to experts r and r + t + 1: one on its own.
    gates = randn(3, 2, seed=rank)
    everyone = [randn(3, 6, seed=9 + r) for r in range(size)]
    chosen = [[[r, (r + t + 1) % size] for t in range(3)] for r in range(size)]
    leaving = sorted(range(6), key=lambda n: chosen[rank][n // 2][n % 2])
    sent_rows = [sum(row.count(e) for row in chosen[rank]) for e in range(size)]
    came = [[t for t in range(3) if rank in chosen[r][t]] for r in range(size)]
    rows = torch.cat([everyone[r][came[r]] for r in range(size)]) * (rank + 1)
    place = torch.arange(len(rows)).flip(0)  # as if this rank had sorted them so
    plan = torch.tensor(leaving), place, sent_rows, [len(c) for c in came], None
    with Sent() as sent:
        y = form(rows[place], gates, plan)
    factors = torch.tensor(chosen[rank]) + 1  # what the experts do
    expected = everyone[rank] * (gates * factors).sum(1, keepdim=True)
    same("each token's sum of its experts' outputs", y, expected)
    away = len(rows) - len(came[rank])
    sends(sent, "the rows that came from other ranks", away * rows[0].nbytes)
