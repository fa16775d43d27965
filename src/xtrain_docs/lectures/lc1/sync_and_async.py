"""Gradient descent with stale gradients."""

from ...values import value


@value
def stale_descent(delay: int, rate: float, steps: int) -> float:
    """Distance to the minimum of x**2 / 2 when gradients are `delay` steps old."""
    seen = [1.0]
    for step in range(steps):
        seen.append(seen[-1] - rate * seen[max(0, step - delay)])
    return abs(seen[-1])
