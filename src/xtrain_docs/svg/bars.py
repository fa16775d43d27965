"""Horizontal bars in groups."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .axes import Axis
from .keys import legend
from .shapes import document, line, rect, text

BAR, GAP, RIGHT = 20, 16, 78
Bars = Mapping[str, Mapping[str, float]]
Also = Mapping[tuple[str, str], Sequence[float]]


def bar_chart(
    bars: Bars,
    value: Axis,
    title: str,
    description: str = "",
    reference: tuple[float, str] | None = None,
    width: int = 400,
    also: Also | None = None,
) -> str:
    """Horizontal bars, grouped: one group per outer name, one bar per inner name.

    The label of the axis is broken where it has a semicolon.

    Args:
        reference: a value to mark with a line and its name, such as 1.0, "gloo".
        also: further values of a group's bar, each a stroke across it.
    """
    names = list(dict.fromkeys(n for group in bars.values() for n in group))
    if not names:
        raise ValueError(f"{title}: no bars")
    also = also or {}
    numbers = [v for group in bars.values() for v in group.values()]
    numbers += [v for values in also.values() for v in values]
    ends = value.ends([*numbers, *([reference[0]] if reference else [])])
    left = 20 + 7.4 * max(len(name) for name in bars)
    keys, rows = legend(names, width) if len(names) > 1 else ([], 0)
    top = 34 + 20 * rows
    groups = Groups(value, ends, left, width - left - RIGHT, float(top))
    groups.marks = [reference[0]] if reference else []
    for group, inner in bars.items():
        groups.add(group, inner, names, also)
    bottom = groups.y - GAP + 4
    parts = [f"<title>{html.escape(title)}</title>", *keys]
    parts += [*groups.ticks(top - 4, bottom), *groups.boxes]
    if reference:
        at = groups.px(reference[0])
        parts.append(line(at, top - 8, at, bottom, "xt-mark"))
        parts.append(text(at, top - 12, reference[1], "xt-mark-text", "middle"))
    parts += groups.told
    for row, words in enumerate(value.label.split("; ")):
        y = bottom + 38 + 18 * row
        parts.append(text(width - RIGHT, y, words, "xt-label", "end"))
    return document(width, int(y + 10), parts, title, description)


@dataclass
class Groups:
    """The bars from top to bottom.

    Attributes:
        left, wide: where values begin, and how long the longest is.
        y: where the next group begins.
        told: the numbers, above every line, which their halo interrupts.
        marks: values with a line of their own, which no number covers.
    """

    axis: Axis
    ends: tuple[float, float]
    left: float
    wide: float
    y: float
    boxes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)

    def length(self, value: float) -> float:
        """How long a bar is."""
        return self.wide * self.axis.place(value, self.ends)

    def px(self, value: float) -> float:
        """The place of a value."""
        return self.left + self.length(value)

    def add(
        self, group: str, inner: Mapping[str, float], names: list[str], also: Also
    ) -> None:
        """A group with its name; a bar has the colour of its place in `names`."""
        middle = self.y + BAR * len(inner) / 2
        self.boxes.append(text(self.left - 12, middle + 4.5, group, "xt-label", "end"))
        for name, amount in inner.items():
            size = max(1.0, self.length(amount))
            words = self.axis.format(amount)
            self.boxes.append(
                rect(self.left, self.y + 2, size, BAR - 4, names.index(name),
                     radius=3, hover=f"{group}, {name}: {words}")
            )  # fmt: skip
            strokes = [self.length(v) for v in also.get((group, name), ())]
            for at in strokes:
                x = self.left + at
                self.boxes.append(line(x, self.y, x, self.y + BAR, "xt-stroke"))
            lines = [*strokes, *map(self.length, self.marks)]
            after = self.left + beside(size, lines, 7.4 * len(words))
            self.told.append(text(after, self.y + 14.5, words, "xt-value-text"))
            self.y += BAR
        self.y += GAP

    def ticks(self, top: float, bottom: float) -> list[str]:
        """Vertical lines and their values."""
        parts = []
        for tick in self.axis.tick_values(self.ends):
            at, words = self.px(tick), self.axis.format(tick)
            parts.append(line(at, top, at, bottom, "xt-grid"))
            parts.append(text(at, bottom + 18, words, "xt-tick", "middle"))
        return parts


def beside(size: float, strokes: Sequence[float], wide: float) -> float:
    """Where a bar's number begins: behind the bar, and behind lines in its way."""
    at = size + 8
    for stroke in sorted(strokes):
        if at - 6 < stroke < at + wide:
            at = stroke + 8
    return at
