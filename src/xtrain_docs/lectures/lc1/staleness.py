"""The chart of the lc1 page on stale gradients."""

from ...figures import REGISTRY
from ...svg import Axis, line_chart

AGES = {0: "fresh", 1: "1 step old"}


def stale_descent(delay: int, rate: float, steps: int) -> list[float]:
    """Distance to the minimum of x**2 / 2 when gradients are `delay` steps old."""
    seen = [1.0]
    for step in range(steps):
        gradient = seen[max(0, step - delay)]
        seen.append(seen[-1] - rate * gradient)
    return [abs(x) for x in seen]


@REGISTRY
def stale_gradients(rate: float = 0.4, steps: int = 30) -> str:
    """Gradient descent with gradients that are 0, 1, 2 and 4 steps old."""
    lines = {
        AGES.get(delay, f"{delay} steps old"): [
            (float(i), x) for i, x in enumerate(stale_descent(delay, rate, steps))
        ]
        for delay in (0, 1, 2, 4)
    }
    return line_chart(
        lines,
        Axis("step", "linear", lambda n: f"{n:g}"),
        Axis("distance to the minimum", "linear"),
        "The same descent with fresh and with stale gradients",
        f"f(x) = x^2 / 2, learning rate {rate:g}.",
    )
