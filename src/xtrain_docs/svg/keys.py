"""What the colours of a drawing mean, above it."""

from collections.abc import Sequence

from .shapes import number, rect, text


def legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """The series of a chart with a dot of their colour each, in rows; how many rows."""
    parts, x, y = [], 8.0, 14.0
    for index, name in enumerate(names):
        if x > 8 and x + 18 + 7.2 * len(name) > width - 8:
            x, y = 8.0, y + 20
        parts.append(
            f'<circle cx="{number(x + 5)}" cy="{number(y - 4)}" r="5" '
            f'class="xt-dot xt-s{index % 8}"/>'
        )
        parts.append(text(x + 16, y, name, f"xt-name xt-s{index % 8}"))
        x += 36 + 7.2 * len(name)
    return parts, round((y - 14) / 20) + 1


def swatches(
    names: Sequence[str],
    *,
    y: float = 6.0,
    apart: float = 42.0,
    letter: float = 7.0,
    opacity: float = 1.0,
    radius: float = 3.0,
    width: float = 400.0,
) -> tuple[list[str], float]:
    """Names behind small boxes of their colours, in rows; and the y of the last row.

    Args:
        apart: from where a name begins to where the next one does, without its letters.
        letter: how wide one is.
    """
    parts, x = [], 6.0
    for index, name in enumerate(names):
        wide = apart + letter * len(name)
        if x > 6 and x + wide > width:
            x, y = 6.0, y + 20
        parts.append(rect(x, y, 12, 12, index, opacity=opacity, radius=radius))
        parts.append(text(x + 18, y + 10.5, name, "xt-tick"))
        x += wide
    return parts, y


def rank_key(ranks: int) -> list[str]:
    """The ranks with their colours, in one row that is 20 high."""
    parts = []
    for rank in range(ranks):
        x = 6 + 96 * rank
        parts += [rect(x, 5, 12, 12, rank), text(x + 18, 15, f"rank {rank}", "xt-tick")]
    return parts
