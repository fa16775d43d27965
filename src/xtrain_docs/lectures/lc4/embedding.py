"""The picture of a vocabulary-parallel lookup."""

from collections.abc import Sequence

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import cell, document, fit, text

WIDTH, EDGE, LEFT, HIGH = 400, 394, 150, 32


@REGISTRY
def embedding_lookup(
    ids: tuple[int, ...] = (0, 3, 4, 7, 4), vocabulary: int = 8, ranks: int = 2
) -> str:
    """Each rank's rows, what it looks up, and the sum of all ranks."""
    from .runs_numbers import embedding_parts

    found = runs.remembered(embedding_parts, ranks, list(ids), vocabulary)
    return embedding_chart(found, list(ids))


def embedding_chart(found: list[dict[str, list[float]]], ids: list[int]) -> str:
    """What `embedding_parts` gives; EvidenceError unless one rank has each id."""
    for place, number in enumerate(ids):
        owners = [held for held in found if held["partial"][place]]
        sums = {held["sum"][place] for held in found}
        if len(owners) != 1 or sums != {number + 1.0}:
            raise EvidenceError(f"id {number}: {found}")
    parts = [text(6, 20, "ids, on every rank", "xt-label")]
    parts += row(4, [(None, str(number)) for number in ids])
    y = 4.0 + HIGH
    for rank, held in enumerate(found):
        low, up = int(held["rows"][0]) - 1, int(held["rows"][-1]) - 1
        parts.append(text(6, y + 16.5, f"rank {rank}, rows {low} to {up}", "xt-tick"))
        looked_up = held["partial"]
        parts += row(
            y, [(rank, f"row {v - 1:g}") if v else (None, "0") for v in looked_up]
        )
        y += HIGH
    parts.append(text(6, y + 16.5, "sum, on every rank", "xt-label"))
    total = []
    for place, value in enumerate(found[0]["sum"]):
        owner = next(r for r, held in enumerate(found) if held["partial"][place])
        total.append((owner, f"row {value - 1:g}"))
    parts += row(y, total)
    words = "; ".join(f"id {n} is looked up by one rank" for n in dict.fromkeys(ids))
    drawing = document(
        WIDTH, int(y + HIGH), parts, "A vocabulary-parallel lookup", words
    )
    return fit(drawing, WIDTH)


def row(y: float, cells: Sequence[tuple[int | None, str]]) -> list[str]:
    """A cell for each id: the rank that it is of, and words."""
    wide = (EDGE - LEFT) / len(cells)
    parts = []
    for place, (rank, words) in enumerate(cells):
        parts += cell(LEFT + place * wide, y, wide - 4, 24, rank, words)
    return parts
