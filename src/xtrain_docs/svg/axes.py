"""The axis of a chart: its ends, its scale and its ticks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Format = Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:.3g}"


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: what is measured, with its unit if the ticks carry none.
        scale: "linear", "log" (ticks at powers of 10) or "log2" (powers of 2).
        format: a number to the text of its tick.
        low, high: fixed ends; by default the data's.
        ticks: fixed tick values.
    """

    label: str
    scale: str = "linear"
    format: Format = _plain
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """The lowest and highest value drawn."""
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        if self.scale == "linear":
            if self.low is None:
                low = min(0.0, low)
            if self.high is None:
                step = _step(low, high)
                high = math.ceil(high / step - 1e-9) * step
        elif low <= 0:
            raise ValueError(f"{self.label}: {low} on a logarithmic axis")
        return (low, high) if high > low else (low, low + 1)

    def place(self, value: float, ends: tuple[float, float]) -> float:
        """The place of a value between the ends, from 0 to 1."""
        low, high = ends
        if self.scale == "linear":
            return (value - low) / (high - low)
        return math.log(value / low) / math.log(high / low)

    def tick_values(self, ends: tuple[float, float]) -> list[float]:
        """Where ticks go: at most about seven."""
        low, high = ends
        if self.ticks is not None:
            return [t for t in self.ticks if low <= t <= high]
        if self.scale == "linear":
            step = _step(low, high)
            first = math.ceil(low / step - 1e-9)
            return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
        base = 2 if self.scale == "log2" else 10
        first = math.ceil(math.log(low, base) - 1e-9)
        last = math.floor(math.log(high, base) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / 8))
        return [float(base) ** i for i in range(first, last + 1, every)]


def _step(low: float, high: float) -> float:
    raw = (high - low) / 5 or 1.0
    size = 10 ** math.floor(math.log10(raw))
    return next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw - 1e-12)
