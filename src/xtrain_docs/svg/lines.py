"""Lines over two axes."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .axes import Axis
from .keys import legend
from .shapes import document, line, number, text

Points = Sequence[tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    title: str,
    description: str = "",
    marks: Sequence[tuple[float, str]] = (),
    width: int = 400,
    height: int = 310,
    dots: Mapping[str, Points] | None = None,
) -> str:
    """Lines over two axes, named in rows above them: a phone can show it whole.

    Args:
        series: points per name, in drawing order.
        marks: vertical lines at x with a short text, such as a crossover.
        dots: of some series, points that are drawn without a line.
    """
    if not series or not all(series.values()):
        raise ValueError(f"{title}: a series without points")
    dots = dots or {}
    every = [p for points in (*series.values(), *dots.values()) for p in points]
    xs = x.ends([p[0] for p in every])
    ys = y.ends([p[1] for p in every])
    keys, rows = legend(list(series), width)
    left, right, top, bottom = 74.0, 18.0, 34.0 + 20 * rows, 52.0
    frame = Frame(x, y, xs, ys, left, top, width - left - right, height - top - bottom)
    parts = [f"<title>{html.escape(title)}</title>", *keys, *frame.axes()]
    parts.append(text(frame.right, height - 8, x.label, "xt-label", "end"))
    parts.append(text(8, top - 18, y.label, "xt-label"))
    for at, words in marks:
        if xs[0] <= at <= xs[1]:
            parts += frame.mark(at, words, width)
    for index, (name, points) in enumerate(series.items()):
        parts += frame.curve(index, name, points)
        parts += frame.dots(index, name, dots.get(name, ()))
    return document(width, height, parts, title, description)


@dataclass(frozen=True)
class Frame:
    """The space between the axes.

    Attributes:
        xs, ys: the values at the ends of both axes.
        left, top, wide, high: where it lies.
    """

    x: Axis
    y: Axis
    xs: tuple[float, float]
    ys: tuple[float, float]
    left: float
    top: float
    wide: float
    high: float

    @property
    def right(self) -> float:
        return self.left + self.wide

    @property
    def bottom(self) -> float:
        return self.top + self.high

    def px(self, value: float) -> float:
        """The place of a value of x."""
        return self.left + self.wide * self.x.place(value, self.xs)

    def py(self, value: float) -> float:
        """The place of a value of y."""
        return self.top + self.high * (1 - self.y.place(value, self.ys))

    def axes(self) -> list[str]:
        """Grid lines and ticks, and the line at the bottom."""
        parts = []
        for tick in self.y.tick_values(self.ys):
            at, words = self.py(tick), self.y.format(tick)
            parts.append(line(self.left, at, self.right, at, "xt-grid"))
            parts.append(text(self.left - 10, at + 4, words, "xt-tick", "end"))
        for tick in self.x.tick_values(self.xs):
            at, words = self.px(tick), self.x.format(tick)
            parts.append(line(at, self.bottom, at, self.bottom + 5, "xt-axis"))
            parts.append(text(at, self.bottom + 20, words, "xt-tick", "middle"))
        parts.append(line(self.left, self.bottom, self.right, self.bottom, "xt-axis"))
        return parts

    def mark(self, value: float, words: str, width: int) -> list[str]:
        """A vertical line with its text, on the side where there is room for it."""
        at = self.px(value)
        late = at + 6 + 7.2 * len(words) > width
        aside, anchor = (-6, "end") if late else (6, "start")
        return [
            line(at, self.top, at, self.bottom, "xt-mark"),
            text(at + aside, self.top + 12, words, "xt-mark-text", anchor),
        ]

    def curve(self, index: int, name: str, points: Points) -> list[str]:
        """One line, with a dot at each point unless there are many."""
        places = [(number(self.px(a)), number(self.py(b))) for a, b in points]
        path = " ".join(f"{px},{py}" for px, py in places)
        line = f'<polyline points="{path}" class="xt-line xt-s{index % 8}"/>'
        return [line, *(self.dots(index, name, points) if len(points) <= 16 else ())]

    def dots(self, index: int, name: str, points: Points) -> list[str]:
        """A dot at each point, with its values for the pointer."""
        parts = []
        for a, b in points:
            hover = f"{name}: {self.x.format(a)}, {self.y.format(b)}"
            parts.append(
                f'<circle cx="{number(self.px(a))}" cy="{number(self.py(b))}" r="3" '
                f'class="xt-dot xt-s{index % 8}">'
                f"<title>{html.escape(hover)}</title></circle>"
            )
        return parts
