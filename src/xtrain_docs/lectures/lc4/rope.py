"""The chart of rotary frequencies that Llama 3.1 slows."""

from ... import runs
from ...figures import REGISTRY
from ...svg import Axis, line_chart

WIDTH = 400


@REGISTRY
def rope_slowing() -> str:
    """How much Llama 3.1's scaling slows a pair, by its turns in the old length."""
    from .runs_numbers import rope_slowdown

    (slower,) = runs.remembered(rope_slowdown, 1, -2, 4, 8)
    return line_chart(
        {"how much slower a pair turns": [(turns, times) for turns, times in slower]},
        Axis("turns of a pair within the original length", "log2", lambda n: f"{n:g}"),
        Axis("times slower", "linear", lambda n: f"{n:g}"),
        "Rotary frequencies of Llama 3.1",
        "Slow pairs are slowed by the factor, fast ones not at all.",
        width=WIDTH,
    )
