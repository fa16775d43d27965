"""Two kinds of drawing that lc2 needs: values on scales, and events in lanes.

Both are at most WIDTH wide, so that a phone shows them whole. Nothing is told by colour
alone: dots and boxes have words in them.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ...svg import document, fit, line, rect, text

WIDTH, EDGE = 400, 14
RADIUS = 10


@dataclass(frozen=True)
class Scale:
    """A row of dots: each a short word at a value."""

    label: str
    dots: Sequence[tuple[str, float]]


def scales(
    rows: Sequence[Scale],
    title: str,
    shared: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """Rows of dots, from the lowest value to the highest; equal ones stand in a pile.

    Args:
        shared: all rows have one scale; otherwise each has its own.
        mark: a value of a shared scale with its name, as a line through all rows.
    """
    every = [value for row in rows for _, value in row.dots]
    parts: list[str] = []
    y, at = 8.0, None
    if mark:
        at = place(mark[0], every)
        parts.append(text(at, y + 10, mark[1], "xt-mark-text", "middle"))
        y += 18
    for index, row in enumerate(rows):
        values = every if shared else [value for _, value in row.dots]
        drawn, y = scale(row, index, values, y, at)
        parts += drawn
    words = "; ".join(
        f"{row.label}: {', '.join(f'{name} {value:.4g}' for name, value in row.dots)}"
        for row in rows
    )
    return fit(document(WIDTH, round(y), parts, title, words), WIDTH)


def scale(
    row: Scale, index: int, values: Sequence[float], y: float, mark: float | None
) -> tuple[list[str], float]:
    """One row below y, with a stroke at `mark`; and where it ends."""
    parts = [text(2, y + 14, row.label, "xt-label")]
    spots: list[tuple[float, int]] = []
    for _, value in row.dots:
        at = place(value, values)
        level = sum(abs(at - other) < 2 * RADIUS for other, _ in spots)
        spots.append((at, level))
    high = 1 + max(level for _, level in spots)
    base = y + 24 + 2 * RADIUS * high
    parts.append(line(EDGE, base, WIDTH - EDGE, base, "xt-axis"))
    if mark is not None:
        parts.append(line(mark, base - 2 * RADIUS - 4, mark, base + 3, "xt-mark"))
    for (name, value), (at, level) in zip(row.dots, spots, strict=True):
        middle = base - RADIUS - 1 - 2 * RADIUS * level
        dot = f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="{RADIUS - 1}"'
        hover = f"<title>{html.escape(name)}: {value:.6g}</title>"
        parts += [
            f'{dot} style="fill:var(--xt-card)"/>',  # hides the stroke behind it
            f'{dot} class="xt-bar-fill xt-s{index % 8}" fill-opacity="0.35">{hover}'
            "</circle>",
            text(at, middle + 4, name, "xt-label", "middle"),
        ]
    for at, value in sorted({place(v, values): v for _, v in row.dots}.items()):
        if not any(0 < at - other < 44 for other, _ in spots):
            parts.append(text(at, base + 15, f"{value:.4g}", "xt-tick", "middle"))
    return parts, base + 30


def place(value: float, values: Sequence[float]) -> float:
    """Where a value lies; a single one in the middle."""
    low, high = min(values), max(values)
    left, right = EDGE + 2 * RADIUS, WIDTH - EDGE - 2 * RADIUS
    share = (value - low) / (high - low) if high - low > 1e-9 * abs(high) else 0.5
    return left + (right - left) * share


@dataclass(frozen=True)
class Box:
    """What happened in one column of a lane.

    Attributes:
        words: one or two lines, shown in the box.
        colour: of the series; None for an empty, dashed box.
        hover: more words.
    """

    words: str
    colour: int | None = 0
    hover: str = ""


def lanes(
    rows: Sequence[tuple[str, Sequence[Box | None]]],
    title: str,
    left: float = 54,
    high: float = 34,
) -> str:
    """A lane for each name, with its boxes from left to right; None leaves a gap."""
    columns = max(len(boxes) for _, boxes in rows)
    wide = (WIDTH - left - 2) / columns
    parts: list[str] = []
    y = 4.0
    for name, boxes in rows:
        parts.append(text(2, y + high / 2 + 4, name, "xt-label"))
        for column, box in enumerate(boxes):
            if box is not None:
                parts += boxed(box, left + wide * column, y, wide - 4, high)
        y += high + 10
    words = "; ".join(
        f"{name}: {', '.join(box.hover or box.words for box in boxes if box)}"
        for name, boxes in rows
    )
    return fit(document(WIDTH, round(y), parts, title, words), WIDTH)


def boxed(box: Box, x: float, y: float, wide: float, high: float) -> list[str]:
    """A box with its words in the middle, in as many lines as they have."""
    empty = box.colour is None
    parts = [rect(x, y, wide, high, box.colour, opacity=1 if empty else 0.35, radius=4,
                  dashes="3 3" if empty else "", hover=box.hover)]  # fmt: skip
    rows = box.words.split("\n")
    first = y + high / 2 + 4 - 7 * (len(rows) - 1)
    for number, words in enumerate(rows):
        parts.append(
            text(x + wide / 2, first + 14 * number, words, "xt-label", "middle")
        )
    return parts
