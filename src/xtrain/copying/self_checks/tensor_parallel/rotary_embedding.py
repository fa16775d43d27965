"""Pairs turn as complex numbers do, and a score depends on the distance alone."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, randn, same, sends

SIZES = (1, 2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    q, k = (randn(2, 8, 5, 4, seed=n) for n in (1, 2))
    positions = 7.0 * torch.arange(5)
    with Sent() as sent:
        mine = form(q.chunk(size, 1)[rank], positions)
    for pair, frequency in enumerate((1.0, 0.01)):  # 10,000 ** (-2 j / 4)
        number = torch.complex(q[..., pair], q[..., pair + 2])
        turned = torch.polar(torch.ones_like(positions), positions * frequency) * number
        expected = torch.stack([turned.real, turned.imag], -1).chunk(size, 1)[rank]
        actual = mine[..., [pair, pair + 2]]
        same(f"pair {pair} of this rank's heads", actual, expected)
    near, far = (
        form(q, positions + shift) @ form(k, positions + shift).mT
        for shift in (0, 1000)
    )
    same("the scores after a shift of both by 1,000", far, near, 1e-10)
    sends(sent, "nothing", 0)
