"""The few statistics that a race needs, on plain lists of seconds.

Times of one contestant are summarised by their median: it does not care how slow
the slow ones were. Two contestants are compared by the ratio of their medians. How
far to trust it is told by the ratios of single rounds, in which both ran one right
after the other: their middle half (first to third quartile).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of one contestant's times."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Baseline over contestant: above 1, the contestant is faster.

    `ratio` is the ratio of medians; `low` and `high` the quartiles of the ratios of
    the `count` rounds in which both samples were kept.
    """

    ratio: float
    low: float
    high: float
    count: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours.

    ValueError for no values.
    """
    if not values:
        raise ValueError("no values: every sample was dropped")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarize(times: Sequence[float]) -> Summary:
    """Median and quartiles of the times."""
    return Summary(
        quantile(times, 0.5), quantile(times, 0.25), quantile(times, 0.75), len(times)
    )


def compare(
    baseline: Sequence[float | None], contestant: Sequence[float | None]
) -> Comparison:
    """Compare two lists of times, one entry per round; None is a dropped sample.

    ValueError when no round has both.
    """
    pairs = zip(baseline, contestant, strict=True)
    ratios = [b / c for b, c in pairs if b is not None and c is not None]
    low, high = quantile(ratios, 0.25), quantile(ratios, 0.75)
    medians = [
        quantile([t for t in times if t is not None], 0.5)
        for times in (baseline, contestant)
    ]
    return Comparison(medians[0] / medians[1], low, high, len(ratios))
