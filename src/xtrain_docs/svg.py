"""Charts as inline SVG text that follows the theme: standard library only.

Colours are CSS classes (`xt-s0` .. `xt-s7` for series), so light and dark need one
drawing. Every chart has a title and a description for readers who do not see it.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
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
        """Where a value lies between the ends, from 0 to 1."""
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


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, cls: str, anchor: str = "start") -> str:
    """One line of text, escaped."""
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" class="{cls}" '
        f'text-anchor="{anchor}">{html.escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    """One straight line."""
    names, values = ("x1", "y1", "x2", "y2"), (x1, y1, x2, y2)
    at = (f'{k}="{_number(v)}"' for k, v in zip(names, values, strict=True))
    return f'<line {" ".join(at)} class="{cls}"/>'


def document(
    width: int, height: int, parts: Sequence[str], title: str, description: str
) -> str:
    """The parts as one SVG element with its name and description."""
    label = html.escape(f"{title}. {description}" if description else title, quote=True)
    return (
        f'<svg class="xt-chart" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


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
) -> str:
    """Lines over two axes, named in rows above them: a phone can show it whole.

    Args:
        series: points per name, in drawing order.
        marks: vertical lines at x with a short text, such as a crossover.
    """
    if not series or not all(series.values()):
        raise ValueError(f"{title}: a series without points")
    every = [p for points in series.values() for p in points]
    xs = x.ends([p[0] for p in every])
    ys = y.ends([p[1] for p in every])
    keys, rows = _legend(list(series), width)
    left, right, top, bottom = 74.0, 18.0, 34.0 + 20 * rows, 52.0
    wide, high = width - left - right, height - top - bottom

    def px(value: float) -> float:
        return left + wide * x.place(value, xs)

    def py(value: float) -> float:
        return top + high * (1 - y.place(value, ys))

    parts = [f"<title>{html.escape(title)}</title>", *keys]
    for tick in y.tick_values(ys):
        parts.append(line(left, py(tick), left + wide, py(tick), "xt-grid"))
        parts.append(text(left - 10, py(tick) + 4, y.format(tick), "xt-tick", "end"))
    for tick in x.tick_values(xs):
        parts.append(line(px(tick), top + high, px(tick), top + high + 5, "xt-axis"))
        parts.append(
            text(px(tick), top + high + 20, x.format(tick), "xt-tick", "middle")
        )
    parts.append(line(left, top + high, left + wide, top + high, "xt-axis"))
    parts.append(text(left + wide, height - 8, x.label, "xt-label", "end"))
    parts.append(text(8, top - 18, y.label, "xt-label"))
    for at, words in marks:
        if xs[0] <= at <= xs[1]:
            parts.append(line(px(at), top, px(at), top + high, "xt-mark"))
            late = px(at) + 6 + 7.2 * len(words) > width
            aside, anchor = (-6, "end") if late else (6, "start")
            parts.append(text(px(at) + aside, top + 12, words, "xt-mark-text", anchor))
    for index, (name, points) in enumerate(series.items()):
        path = " ".join(f"{_number(px(a))},{_number(py(b))}" for a, b in points)
        parts.append(f'<polyline points="{path}" class="xt-line xt-s{index % 8}"/>')
        if len(points) <= 16:
            parts += [
                f'<circle cx="{_number(px(a))}" cy="{_number(py(b))}" r="3" '
                f'class="xt-dot xt-s{index % 8}"><title>{html.escape(name)}: '
                f"{html.escape(x.format(a))}, {html.escape(y.format(b))}</title>"
                "</circle>"
                for a, b in points
            ]
    return fit(document(width, height, parts, title, description), width)


def _legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """The names with a dot of their colour each, in rows; and how many rows."""
    parts, x, y = [], 8.0, 14.0
    for index, name in enumerate(names):
        if x > 8 and x + 18 + 7.2 * len(name) > width - 8:
            x, y = 8.0, y + 20
        parts.append(
            f'<circle cx="{_number(x + 5)}" cy="{_number(y - 4)}" r="5" '
            f'class="xt-dot xt-s{index % 8}"/>'
        )
        parts.append(text(x + 16, y, name, f"xt-name xt-s{index % 8}"))
        x += 36 + 7.2 * len(name)
    return parts, round((y - 14) / 20) + 1


def fit(drawing: str, width: int) -> str:
    """A drawing that shrinks with the page and grows to 1.3 of its size."""
    style = f'style="min-width:0;max-width:{round(1.3 * width)}px"'
    return drawing.replace('class="xt-chart"', f'class="xt-chart" {style}', 1)


def beside(size: float, strokes: Sequence[float], wide: float) -> float:
    """Where a bar's number begins: behind the bar, and behind strokes in its way."""
    at = size + 8
    for stroke in sorted(strokes):
        if at - 6 < stroke < at + wide:
            at = stroke + 8
    return at


def bar_chart(
    bars: Mapping[str, Mapping[str, float]],
    value: Axis,
    title: str,
    description: str = "",
    reference: tuple[float, str] | None = None,
    width: int = 400,
    also: Mapping[tuple[str, str], Sequence[float]] | None = None,
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
    numbers = [v for group in bars.values() for v in group.values()]
    numbers += [v for values in (also or {}).values() for v in values]
    ends = value.ends([*numbers, *([reference[0]] if reference else [])])
    left = 20 + 7.4 * max(len(name) for name in bars)
    right, bar, gap = 78, 20, 16
    keys, rows = _legend(names, width) if len(names) > 1 else ([], 0)
    top = 34 + 20 * rows
    wide = width - left - right
    parts = [f"<title>{html.escape(title)}</title>", *keys]
    y = float(top)
    body: list[str] = []
    told: list[str] = []  # above every line, which their halo interrupts
    for group, inner in bars.items():
        middle = y + bar * len(inner) / 2
        body.append(text(left - 12, middle + 4.5, group, "xt-label", "end"))
        for name, amount in inner.items():
            index = names.index(name)
            size = max(1.0, wide * value.place(amount, ends))
            words = value.format(amount)
            body.append(
                f'<rect x="{_number(left)}" y="{_number(y + 2)}" '
                f'width="{_number(size)}" height="{bar - 4}" rx="3" '
                f'class="xt-bar-fill xt-s{index % 8}"><title>'
                f"{html.escape(f'{group}, {name}: {words}')}</title></rect>"
            )
            strokes = [
                wide * value.place(v, ends) for v in (also or {}).get((group, name), ())
            ]
            body += [line(left + s, y, left + s, y + bar, "xt-stroke") for s in strokes]
            after = left + beside(size, strokes, 7.4 * len(words))
            told.append(text(after, y + 14.5, words, "xt-value-text"))
            y += bar
        y += gap
    bottom = y - gap + 4
    for tick in value.tick_values(ends):
        at = left + wide * value.place(tick, ends)
        parts.append(line(at, top - 4, at, bottom, "xt-grid"))
        parts.append(text(at, bottom + 18, value.format(tick), "xt-tick", "middle"))
    parts += body
    if reference:
        at = left + wide * value.place(reference[0], ends)
        parts.append(line(at, top - 8, at, bottom, "xt-mark"))
        parts.append(text(at, top - 12, reference[1], "xt-mark-text", "middle"))
    parts += told
    under = value.label.split("; ")
    for row, words in enumerate(under):
        at = bottom + 38 + 18 * row
        parts.append(text(left + wide, at, words, "xt-label", "end"))
    return document(width, int(at + 10), parts, title, description)
