"""The picture of clipping a sharded gradient."""

from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import cell, document, fit, line, rect, text

WIDTH, HIGH, TOP = 400, 34, 40.0
GRADIENT = [3.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0, 0.0]
COLUMNS = {"gradient": 54, "squares": 124, "all-reduced": 188, "clipped": 306}


@REGISTRY
def clipping_picture(ranks: int = 4, max_norm: float = 1.3) -> str:
    """Squares of each rank's shard, their sum on every rank, and the clipped shards."""
    from .runs_values import clipped_shards

    return clipping_chart(
        runs.remembered(clipped_shards, ranks, GRADIENT, max_norm), max_norm
    )


def clipping_chart(found: list[dict[str, Any]], max_norm: float) -> str:
    """What `clipped_shards` gives by rank; EvidenceError unless the sums are sums."""
    total = sum(held["own"] for held in found)
    if {held["summed"] for held in found} != {total}:
        raise EvidenceError(f"squares add up to {total}, ranks have {found}")
    norm = total**0.5
    factor = min(1.0, max_norm / norm)
    bottom = TOP + HIGH * len(found)
    middle = (TOP + bottom) / 2 - 4
    parts = [text(x, 18, words, "xt-label") for words, x in COLUMNS.items()]
    parts.append(rect(188, TOP, 94, bottom - TOP - 8, 0, opacity=0.16, radius=2))
    for dy, words in ((-22, f"sum {total:g}"), (2, f"norm {norm:g}"),
                      (26, f"times {factor:.3g}")):  # fmt: skip
        parts.append(text(235, middle + dy + 4, words, "xt-label", "middle"))
    for rank, held in enumerate(found):
        parts += shard_row(rank, held)
    squares = " + ".join(f"{held['own']:g}" for held in found)
    words = f"{squares} = {total:g}, so the norm is {norm:g}, the factor {factor:.3g}"
    drawing = document(WIDTH, int(bottom), parts, "Clipping a sharded gradient", words)
    return fit(drawing, WIDTH)


def shard_row(rank: int, held: dict[str, Any]) -> list[str]:
    """A rank's elements before and after, and the sum of its squares between them."""
    y = TOP + rank * HIGH
    parts = [text(6, y + 17, f"rank {rank}", "xt-tick")]
    for x, key, wide, colour in ((54, "before", 28, 1), (306, "after", 42, 2)):
        for place, value in enumerate(held[key]):
            at, words = x + place * (wide + 3), f"{round(value, 3):g}"
            parts += cell(at, y, wide, 26, colour, words, low=4, radius=2)
    parts.append(text(154, y + 17, f"{held['own']:g}", "xt-value-text", "end"))
    parts.append(line(160, y + 13, 186, y + 13, "xt-axis"))
    parts.append(line(284, y + 13, 304, y + 13, "xt-axis"))
    return parts
