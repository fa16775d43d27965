"""Rows of bars over time, for the timelines of lc3: events are found, then drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...svg import TimeAxis, document, fit, line, rect, text

Event = list[Any]
WIDTH, LEFT, ROW, HEAD = 400, 60, 38, 16
LAYERS, MODEL_WIDTH, TOKENS = 4, 256, 128
# where in its row a bar lies, how high it is, its colour and how opaque it is
LANES = {
    "whole": (0, 36, 5, 0.2),
    "all-gather": (3, 6, 0, 1.0),
    "forward": (12, 14, 2, 0.4),
    "backward": (12, 14, 6, 0.4),
    "step": (12, 14, 3, 0.4),
    "reduce-scatter": (29, 6, 1, 1.0),
    "all-reduce": (0, 36, 7, 0.5),
}


@dataclass(frozen=True)
class Bar:
    """Something that takes time in a row; `words` is written into it."""

    row: int
    lane: str
    start: float
    stop: float
    words: str = ""


def spans(events: Sequence[Event], begin: str, *ends: str) -> list[Bar]:
    """From each `begin` to the first of the `ends` of the same number."""
    lane = {"unshard": "all-gather"}.get(begin, begin)
    words = {"forward": "F", "backward": "B", "step": "S"}.get(lane, "")
    under_way: dict[int, float] = {}
    found = []
    for what, number, at in events:
        if what == begin:
            under_way[number] = at
        elif what in ends and number in under_way:
            found.append(Bar(number, lane, under_way.pop(number), at, words))
    return found


def reductions(events: Sequence[Event]) -> list[Bar]:
    """The reduce-scatters, until they are done."""
    return spans(events, "reduce-scatter", "reduce-scatter done",
                 "reduce-scatter waited")  # fmt: skip


def most_at_once(bars: Sequence[Bar]) -> int:
    """How many of the bars there are at the same time, at most."""
    return max(sum(b.start <= bar.start < b.stop for b in bars) for bar in bars)


def turning(events: Sequence[Event]) -> tuple[float, float]:
    """When the last forward ends, and when backward is over."""
    over = next(at for what, _, at in events if what == "backward over")
    return max(at for what, _, at in events if what == "forward ends"), over


def draw(
    bars: Sequence[Bar],
    rows: Sequence[str],
    phases: Sequence[tuple[str, float]],
    last: float,
    top: float,
) -> list[str]:
    """Rows of bars over time, from `top` on; `phases` have the time at which each ends.

    `last` is the time at the right edge.
    """
    axis = TimeAxis(last, LEFT, WIDTH)
    parts, began = [], 0.0
    bottom = top + HEAD + ROW * len(rows)
    for name, ends in phases:
        middle = min(axis.at((began + ends) / 2), WIDTH - 6 - 3.4 * len(name))
        parts.append(text(middle, top + 11, name, "xt-tick", "middle"))
        parts.append(line(axis.at(ends), top + 2, axis.at(ends), bottom, "xt-grid"))
        began = ends
    for row, name in enumerate(rows):
        y = top + HEAD + row * ROW
        parts.append(text(LEFT - 6, y + 23, name, "xt-tick", "end"))
    for bar in sorted(bars, key=lambda b: b.lane != "whole"):
        dy, height, colour, opacity = LANES[bar.lane]
        y, what = top + HEAD + bar.row * ROW + dy, f"{bar.lane}, {rows[bar.row]}"
        parts.append(axis.bar(what, bar.start, bar.stop, y, height, colour, opacity))
        if bar.words and axis.at(bar.stop) - axis.at(bar.start) > 10:
            middle = (axis.at(bar.start) + axis.at(bar.stop)) / 2
            parts.append(text(middle, y + 11.5, bar.words, "xt-label", "middle"))
    parts.append(axis.base(bottom + 2))
    return parts


def legend(names: dict[str, str], columns: Sequence[int] = (6, 196)) -> list[str]:
    """What the lanes are, each drawn as it lies in its row; `columns` begin at x."""
    parts = []
    for index, (lane, words) in enumerate(names.items()):
        x, y = columns[index % len(columns)], 2 + 20 * (index // len(columns))
        dy, height, colour, opacity = LANES[lane]
        high = max(5, 0.4 * height)
        parts.append(
            rect(x, y + dy * 0.35, 20, high, colour, opacity=opacity, radius=1)
        )
        parts.append(text(x + 27, y + 12, words, "xt-tick"))
    return parts


def finish(parts: list[str], bottom: float, last: float, title: str, words: str) -> str:
    """The drawing with the times at its ends."""
    parts += TimeAxis(last, LEFT, WIDTH).ends(bottom + 16)
    return fit(document(WIDTH, int(bottom + 22), parts, title, words), WIDTH)
