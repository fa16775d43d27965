"""No rank is idle if F = B = W; about twice as many micro-batches wait."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import played, same, show


def check(form: Any) -> None:
    orders = form(4, 10)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 4 stages and 10 micro-batches", actions, 4 * 10 * 3)
    same("idle time of all ranks, (p - 1)(F + B - 2W)", idle, [0.0] * 4)
    ahead = [order.index(f"{rank}B0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, 2(p - r) - 1", ahead, [7, 5, 3, 1])
