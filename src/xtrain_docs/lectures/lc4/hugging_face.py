"""The page on Hugging Face files: what each rank reads of a model's file."""

from collections.abc import Iterator

from ...figures import REGISTRY
from ...svg import document, line, rank_key, rect, text
from .whole_model import RANKS, Slice, slices

WIDTH, LEFT, RIGHT, LANE = 400, 118, 394, 7


@REGISTRY
def bytes_of_a_file() -> str:
    """Every tensor of a file as a bar of its bytes, in a lane for each rank."""
    parts, y, read = rank_key(RANKS), 30.0, [0] * RANKS
    for name, shape, held in slices():
        size = " × ".join(map(str, shape))
        parts.append(text(LEFT - 8, y + 12, name, "xt-tick", "end"))
        parts.append(text(LEFT - 8, y + 25, size, "xt-tick", "end"))
        scale = (RIGHT - LEFT) / (shape[0] * (shape[1] if shape[1:] else 1))
        for rank, mine in enumerate(held):
            top = y + LANE * rank
            parts.append(line(LEFT, top + 3, RIGHT, top + 3, "xt-grid"))
            for low, end in ranges(shape, mine):
                wide = (end - low) * scale - 0.5
                parts.append(rect(LEFT + low * scale, top, wide, LANE - 1, rank))
                read[rank] += end - low
        y += LANE * RANKS + 8
    words = "; ".join(f"rank {rank} reads {n} elements" for rank, n in enumerate(read))
    title = "Which bytes of a file each rank reads"
    return document(WIDTH, y, parts, title, words)


def ranges(shape: list[int], held: Slice) -> Iterator[tuple[int, int]]:
    """Of the flattened tensor. Whole rows lie side by side."""
    dim, low, end = held
    if len(shape) == 1:
        yield low, end
    elif dim == 0:
        yield low * shape[1], end * shape[1]
    else:
        yield from ((r * shape[1] + low, r * shape[1] + end) for r in range(shape[0]))
