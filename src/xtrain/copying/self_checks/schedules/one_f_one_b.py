"""GPipe's bubble, and fewer micro-batches that wait."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import played, same, show


def check(form: Any) -> None:
    orders = form(4, 6)
    show(orders)
    idle, actions = played(orders)
    same("forwards and backwards of 4 stages and 6 micro-batches", actions, 4 * 6 * 2)
    same("idle time of rank 0, (p - 1)(F + BW)", idle[0], 3 * 3.0)
    ahead = [order.index(f"{rank}BW0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, p - r", ahead, [4, 3, 2, 1])
