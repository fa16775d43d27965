"""Pictures of shards: which elements each rank holds, and how a flat vector is cut."""

from collections.abc import Sequence
from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import cell, document, fit, rect, swatches, text

WIDTH, EDGE = 400, 394
KINDS = ("weights", "gradients", "optimizer state")
Held = dict[str, list[list[int]]]  # of a kind, ranges of elements


@REGISTRY
def zero_parts(stages: str | int = "1 2", ranks: int = 4) -> str:
    """Which elements of the model each rank holds at the end of backward."""
    from .runs_parts import parts_held
    from .runs_training import parameters_of_tower

    found = {s: runs.remembered(parts_held, ranks, s) for s in str(stages).split()}
    return parts_chart(found, parameters_of_tower())


def parts_chart(found: dict[str, list[Held]], total: int) -> str:
    """Ranges of elements by stage, rank and kind, in strips of the whole model."""
    parts, _ = swatches(KINDS, y=4, apart=40, radius=2)
    y, words = 28.0, []
    for stage, of_ranks in found.items():
        if len(found) > 1:
            parts.append(text(6, y + 10, f"stage {stage}", "xt-label"))
            y += 18
        for rank, held in enumerate(of_ranks):
            drawn, y = strips(rank, held, total, y)
            parts += drawn
        shares = {k: sum(b - a for a, b in of_ranks[0][k]) / total for k in KINDS}
        shown = ", ".join(f"{share:g} of the {kind}" for kind, share in shares.items())
        words.append(f"stage {stage}: each rank holds {shown}")
    drawing = document(WIDTH, int(y), parts, "What each rank holds", "; ".join(words))
    return fit(drawing, WIDTH)


def strips(rank: int, held: Held, total: int, y: float) -> tuple[list[str], float]:
    """A strip of each kind for one rank, below y; and where they end."""
    left, strip = 56, 9
    scale = (EDGE - left) / total
    parts = [text(left - 8, y + 18, f"rank {rank}", "xt-tick", "end")]
    for colour, kind in enumerate(KINDS):
        parts.append(rect(left, y, EDGE - left, strip - 1, None, radius=2))
        for start, stop in held[kind]:
            at, width = left + start * scale, (stop - start) * scale
            parts.append(rect(at, y, width, strip - 1, colour, radius=2))
        y += strip
    return parts, y + 8


@REGISTRY
def flat_cut(ranks: int = 4) -> str:
    """Three parameters, their flat vector, and the shard of each rank."""
    from .runs_values import SHAPES, flat_shards

    return flat_chart(runs.remembered(flat_shards, ranks), SHAPES)


def flat_chart(found: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> str:
    """What `flat_shards` gives by rank: element i is i, and 0 is padding."""
    owner = {
        round(value): index
        for held in found
        for index, name in enumerate(shapes)
        for value in held["pieces"][name]
    }
    flat = [round(value) for held in found for value in held["shard"]]
    numel = len(owner)
    if flat != [*range(1, numel + 1), *[0] * (len(flat) - numel)]:
        raise EvidenceError(f"the shards end to end are {flat}")
    left, high, y = 66, 30, 24.0
    wide = (EDGE - left) / len(flat)
    parts = []
    for index, (name, shape) in enumerate(shapes.items()):
        first = next(number for number in flat if owner.get(number) == index)
        x = left + (first - 1) * wide
        parts.append(text(x, y - 8, f"{name} {list(shape)}", "xt-label"))
    parts.append(text(6, y + 15, "flat", "xt-label"))
    parts += elements(flat, owner, left, y, wide)
    y += high + 8
    for rank, held in enumerate(found):
        shard = [round(value) for value in held["shard"]]
        parts.append(text(6, y + 15, f"rank {rank}", "xt-label"))
        parts += elements(shard, owner, left + rank * len(shard) * wide, y, wide)
        y += high
    words = "; ".join([*map(holding, range(len(found)), found),
                       f"{flat.count(0)} elements of padding at the end"])  # fmt: skip
    title = "A flat vector cut into equal shards"
    return fit(document(WIDTH, int(y), parts, title, words), WIDTH)


def elements(
    numbers: Sequence[int], owner: dict[int, int], x: float, y: float, wide: float
) -> list[str]:
    """A cell for each, in the colour of its parameter; padding is empty."""
    parts = []
    for place, number in enumerate(numbers):
        parts += cell(x + place * wide, y, wide - 2, 22, owner.get(number), str(number),
                      low=4, opacity=0.3, radius=2)  # fmt: skip
    return parts


def holding(rank: int, held: dict[str, Any]) -> str:
    """How many elements of which parameters, in words."""
    pieces = [f"{len(v)} of {name}" for name, v in held["pieces"].items() if v]
    return f"rank {rank} holds {', '.join(pieces)}"
