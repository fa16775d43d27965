"""No rank is idle if F = B = W, and no more waits than in 1F1B."""

from typing import Any

from xtrain.copying.self_checks.schedules.harness import parts_of, played, same, show


def waiting(order: list[str]) -> int:
    """The most stages' micro-batches that are between F and W."""
    most = now = 0
    for _, kind, _ in parts_of(" ".join(order)):
        now += {"F": 1, "B": 0, "W": -1}[kind]
        most = max(most, now)
    return most


def check(form: Any) -> None:
    orders = form(4, 8)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 8 stages and 8 micro-batches", actions, 8 * 8 * 3)
    same("idle time of all ranks", idle, [0.0] * 4)
    most = [waiting(order) for order in orders]
    same("of half a rank's layers, micro-batches that wait: 2p", most, [8] * 4)
