"""The bubble of DualPipe on 8 ranks, and the gradients of every weight."""

from collections import Counter
from typing import Any

from xtrain.copying.self_checks.schedules.harness import parts_of, played, same, show


def check(form: Any) -> None:
    orders = form(4, 20)
    show(orders)
    idle, _ = played(orders)
    same("idle time of rank 0, (p - 1)(F&B + BW - 3W)", idle[0], 3 * 2.0)
    kinds = Counter(
        kind[0] for order in orders for _, kind, _ in parts_of(" ".join(order))
    )
    same("forwards of 8 stages and 20 micro-batches", kinds["F"], 8 * 20)
    same("gradients of inputs", kinds["B"], 8 * 20)
