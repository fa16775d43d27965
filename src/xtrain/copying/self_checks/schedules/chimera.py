"""The bubble of the paper, and every stage's work in both directions."""

from collections import Counter
from typing import Any

from xtrain.copying.self_checks.schedules.harness import parts_of, played, same, show


def check(form: Any) -> None:
    orders = form(4, 4)
    show(orders)
    idle, _ = played(orders)
    same("idle time of rank 0, 2(p - 2)F", idle[0], 4.0)
    kinds = Counter(
        kind for order in orders for _, kind, _ in parts_of(" ".join(order))
    )
    same("forwards of 4 stages and 4 micro-batches", kinds["F"], 4 * 4)
    same("backwards", kinds["BW"], 4 * 4)
