"""Text, lines, boxes, and the document that holds them."""

import html
from collections.abc import Sequence


def number(value: float) -> str:
    """A place or a size, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, cls: str, anchor: str = "start") -> str:
    """One line of text, escaped."""
    return (
        f'<text x="{number(x)}" y="{number(y)}" class="{cls}" '
        f'text-anchor="{anchor}">{html.escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    """One straight line."""
    names, values = ("x1", "y1", "x2", "y2"), (x1, y1, x2, y2)
    at = (f'{k}="{number(v)}"' for k, v in zip(names, values, strict=True))
    return f'<line {" ".join(at)} class="{cls}"/>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: int | None,
    *,
    opacity: float = 1.0,
    radius: float = 0.0,
    dashes: str = "",
    hover: str = "",
) -> str:
    """A box.

    Args:
        colour: of the series that fills it; None for an empty one.
        dashes: of the edge of an empty one, such as "3 3".
        hover: shown when it is pointed at.
    """
    names, values = ("x", "y", "width", "height"), (x, y, width, height)
    look = [f'{k}="{number(v)}"' for k, v in zip(names, values, strict=True)]
    if radius:
        look.append(f'rx="{radius:g}"')
    if colour is None:
        look.append('class="xt-axis" fill="none"')
    else:
        look.append(f'class="xt-bar-fill xt-s{colour % 8}"')
    if dashes:
        look.append(f'stroke-dasharray="{dashes}"')
    if opacity != 1:
        look.append(f'fill-opacity="{round(opacity, 2):g}"')
    opened = f"<rect {' '.join(look)}"
    if not hover:
        return f"{opened}/>"
    return f"{opened}><title>{html.escape(hover)}</title></rect>"


def cell(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: int | None,
    words: str,
    *,
    cls: str = "xt-label",
    low: float = 4.5,
    opacity: float = 0.28,
    radius: float = 3.0,
    dashes: str = "",
    hover: str = "",
) -> list[str]:
    """A pale box with words in its middle, `low` below its centre."""
    opacity = 1.0 if colour is None else opacity
    return [
        rect(x, y, width, height, colour, opacity=opacity, radius=radius,
             dashes=dashes, hover=hover),
        text(x + width / 2, y + height / 2 + low, words, cls, "middle"),
    ]  # fmt: skip


def document(
    width: int, height: float, parts: Sequence[str], title: str, description: str
) -> str:
    """The parts as one SVG element with its name and description.

    It shrinks with the page until its letters, of 12.5 px and more, have 10 px, and
    then scrolls; it grows to 1.3 of its size.
    """
    label = html.escape(f"{title}. {description}" if description else title, quote=True)
    return (
        f'<svg class="xt-chart" viewBox="0 0 {width} {int(height)}" width="{width}" '
        f'height="{int(height)}" style="min-width:{round(0.8 * width)}px;'
        f'max-width:{round(1.3 * width)}px" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )
