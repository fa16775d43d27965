"""Bars of several parts, one below the other."""

from collections.abc import Callable, Mapping, Sequence

from .keys import swatches
from .shapes import document, rect, text


def stacked(
    bars: Mapping[str, Sequence[float]],
    names: Sequence[str],
    title: str,
    tell: Callable[[float, float], str],
    shares: bool = False,
    width: int = 400,
) -> str:
    """A bar for each name, cut by its parts, in the colours of `names`.

    Args:
        tell: words for a part, given it and the whole bar.
        shares: all bars are as long, with words in the parts.
    """
    left, right = 12 + 7.2 * max(map(len, bars)), 0 if shares else 74
    most = max(map(sum, bars.values()))
    parts, y = swatches(names, y=4, opacity=0.4, radius=2)
    words = []
    for name, sizes in bars.items():
        y += 34
        of = sum(sizes)
        scale, at = (width - 6 - left - right) / (of if shares else most), left
        parts.append(text(6, y + 9, name, "xt-label"))
        for colour, size in enumerate(sizes):
            wide, said = scale * size, tell(size, of)
            hover = f"{names[colour]}: {said}"
            if size:
                parts.append(rect(at, y - 8, max(wide - 1, 1), 26, colour, opacity=0.4,
                                  radius=2, hover=hover))  # fmt: skip
            if shares and wide > 32:
                parts.append(text(at + wide / 2, y + 9, said, "xt-label", "middle"))
            at += wide
            words.append(f"{name}, {hover}")
        if not shares:
            parts.append(text(at + 8, y + 9, tell(of, of), "xt-value-text"))
    return document(width, y + 26, parts, title, "; ".join(words))
