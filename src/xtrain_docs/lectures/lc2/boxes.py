"""Boxes with words in one or two lines, alone and in lanes."""

from collections.abc import Sequence
from typing import NamedTuple

from ...svg import document, rect, text

WIDTH = 400


class Box(NamedTuple):
    """What happened: words, the colour of a series (None: dashed), more words."""

    words: str
    colour: int | None = 0
    hover: str = ""


def boxed(box: Box, x: float, y: float, wide: float, high: float) -> list[str]:
    """A box with its words in the middle, in as many lines as they have."""
    empty = box.colour is None
    parts = [rect(x, y, wide, high, box.colour, opacity=1 if empty else 0.35, radius=4,
                  dashes="3 3" if empty else "", hover=box.hover)]  # fmt: skip
    lines = box.words.split("\n")
    first = y + high / 2 + 4 - 7 * (len(lines) - 1)
    for number, words in enumerate(lines):
        at = first + 14 * number
        parts.append(text(x + wide / 2, at, words, "xt-label", "middle"))
    return parts


def lanes(rows: Sequence[tuple[str, Sequence[Box | None]]], title: str) -> str:
    """A lane for each name, with its boxes from left to right; None leaves a gap."""
    left, high = 58, 40
    wide = (WIDTH - left - 2) / max(len(boxes) for _, boxes in rows)
    parts: list[str] = []
    for row, (name, boxes) in enumerate(rows):
        y = 4 + (high + 10) * row
        parts.append(text(2, y + high / 2 + 4, name, "xt-label"))
        for column, box in enumerate(boxes):
            if box:
                parts += boxed(box, left + wide * column, y, wide - 4, high)
    words = "; ".join(
        f"{name}: {', '.join(box.hover or box.words for box in boxes if box)}"
        for name, boxes in rows
    )
    return document(WIDTH, 4 + (high + 10) * len(rows), parts, title, words)
