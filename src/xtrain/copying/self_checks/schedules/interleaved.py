"""The bubble is divided by the chunks."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import played, same, show


def check(form: Any) -> None:
    for chunks in (1, 2, 3):
        orders = form(4, 8, chunks)
        idle, actions = played(orders)
        same(f"actions with {chunks} chunks", actions, 4 * chunks * 8 * 2)
        same("idle time, (p - 1)(F + BW) of one chunk", idle[0], 3 * 3.0)
    show(form(2, 4, 2))
