"""The bubble of 4 ranks, and who holds how much."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import played, same, show


def check(form: Any) -> None:
    orders = form(4, 6)
    show(orders)
    idle, actions = played(orders)
    same("forwards and backwards of 4 stages and 6 micro-batches", actions, 4 * 6 * 2)
    same("idle time of rank 0, (p - 1)(F + BW)", idle[0], 3 * 3.0)
    ahead = orders[3].index("3BW0")
    same("micro-batches that wait on the last rank", ahead, 6)
