"""The picture and the table of what each rank reads of a model's file."""

from collections.abc import Iterator, Sequence
from math import prod

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rank_key, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .slices import short

WIDTH, LEFT, RIGHT, LANE = 400, 118, 394, 7


@FIGURES
def bytes_of_a_file(ranks: int = 4) -> str:
    """Every tensor of a file as a bar of its bytes, in a lane for each rank."""
    from .runs_model import ranges_read

    found = runs.remembered(ranges_read, ranks)
    parts, y, words = rank_key(ranks), 30.0, []
    for name, shape in found[0]["shapes"].items():
        parts.append(text(LEFT - 8, y + 12, short(name), "xt-tick", "end"))
        size = f"{' × '.join(map(str, shape))}"
        parts.append(text(LEFT - 8, y + 25, size, "xt-tick", "end"))
        for rank, result in enumerate(found):
            top = y + LANE * rank
            parts.append(line(LEFT, top + 3, RIGHT, top + 3, "xt-grid"))
            for low, high in elements(name, shape, result["asked"]):
                scale = (RIGHT - LEFT) / prod(shape)
                at, wide = LEFT + low * scale, (high - low) * scale - 0.5
                parts.append(rect(at, top, wide, LANE - 1, rank))
        y += LANE * ranks + 8
    for rank, result in enumerate(found):
        words.append(f"rank {rank} reads {result['held']} of {result['file']} bytes")
    title = "Which bytes of a file each rank reads"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def elements(
    name: str, shape: Sequence[int], asked: Sequence[Sequence]
) -> Iterator[tuple[int, int]]:
    """Ranges of the flattened tensor that the boxes of `name` consist of."""
    for wanted, low, high in asked:
        if wanted != name:
            continue
        if len(shape) == 1:
            yield low[0], high[0]
        elif (low[1], high[1]) == (0, shape[1]):  # whole rows lie side by side
            yield low[0] * shape[1], high[0] * shape[1]
        else:
            for row in range(low[0], high[0]):
                yield row * shape[1] + low[1], row * shape[1] + high[1]


@TABLES
def bytes_read(ranks: tuple[int, ...] = (1, 2, 4)) -> Table:
    """Bytes of the weights that each rank asks for, holds, and that the file has."""
    from .runs_model import ITEMSIZE_OF_FILE, ranges_read

    rows = []
    for size in ranks:
        found = runs.remembered(ranges_read, size)
        for rank, one in enumerate(found):
            asked = sum(
                prod(high - low for low, high in zip(*box, strict=True))
                for _, *box in one["asked"]
            )
            if asked * ITEMSIZE_OF_FILE != one["held"]:
                raise EvidenceError(f"rank {rank} of {size}: {asked} elements asked")
        whole = sum(map(prod, found[0]["shapes"].values())) * ITEMSIZE_OF_FILE
        rows.append([str(size), count(whole), count(found[0]["held"]),
                     f"{found[0]['held'] / whole:.3g}"])  # fmt: skip
    header = ["ranks", "bytes of weights", "read and held by rank 0", "share"]
    return Table(header, rows, "rrrr")
