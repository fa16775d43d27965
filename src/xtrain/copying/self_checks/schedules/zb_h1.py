"""A third of 1F1B's bubble, in the same memory."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import played, same, show


def check(form: Any) -> None:
    orders = form(4, 8)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 4 stages and 8 micro-batches", actions, 4 * 8 * 3)
    same("idle time of rank 0, (p - 1)(F + B - W)", idle[0], 3 * 1.0)
    ahead = [order.index(f"{rank}B0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, p - r", ahead, [4, 3, 2, 1])
