"""Pictures of the cells that ranks hold: around a collective, and in a mesh."""

from collections.abc import Sequence
from math import prod

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, fit, rect, text

CELL, ROW, GAP = 36, 30, 40


def label(value: int, ranks: int) -> tuple[str, int]:
    """What a cell holds, as text and the number of its colour.

    A cell is a whole number with bit r * N + c set for "cell c of rank r"; the sum
    over all ranks has one bit of every rank. Raises ValueError for anything else.
    """
    bits = [i for i in range(ranks * ranks) if value >> i & 1]
    owners, places = {i // ranks for i in bits}, {i % ranks for i in bits}
    if not bits:
        return "", -1
    if len(places) > 1 or len(owners) != len(bits):
        raise ValueError(f"{value:b} mixes cells")
    place = places.pop()
    if len(bits) == 1:
        owner = owners.pop()
        return f"{'abcdefgh'[owner]}{place}", owner
    if len(bits) < ranks:
        raise ValueError(f"{value:b} is a sum of some ranks only")
    return f"\u03a3{place}", 7


def drawn(x: float, y: float, words: str, colour: int) -> list[str]:
    """A cell with its words; an empty one is dashed."""
    if colour < 0:
        return [rect(x, y, CELL - 4, ROW - 4, None, radius=5, dashes="2 4")]
    return cell(x, y, CELL - 4, ROW - 4, colour, words, radius=5, low=5)


@REGISTRY
def before_after(name: str, ranks: int = 4, root: int = 0) -> str:
    """The cells of every rank before and after a collective, from a real run."""
    from .runs import cells_before_and_after

    found = runs.remembered(cells_before_and_after, ranks, name, root)
    left, top = 56, 30
    widest = [max(len(r[side]) for r in found) for side in (0, 1)]
    second = left + widest[0] * CELL + GAP
    width = int(second + max(widest[1], 2) * CELL + 6)
    parts = [
        text(left, 16, "before", "xt-tick"),
        text(second, 16, "after", "xt-tick"),
    ]
    for rank, sides in enumerate(found):
        y = top + rank * ROW
        parts.append(text(left - 8, y + 18, f"rank {rank}", "xt-tick", "end"))
        for start, cells in zip((left, second), sides, strict=True):
            for place, value in enumerate(cells):
                parts += drawn(start + place * CELL, y, *label(value, ranks))
    middle = top + ranks * ROW / 2 + 4
    parts.append(text(second - GAP / 2 - 2, middle, "\u2192", "xt-label", "middle"))
    title = f"{name} on {ranks} ranks, before and after"
    rows = "; ".join(
        f"rank {rank}: {_words(sides[0], ranks)} becomes {_words(sides[1], ranks)}"
        for rank, sides in enumerate(found)
    )
    return fit(document(width, top + ranks * ROW + 6, parts, title, rows), width)


def _words(cells: Sequence[int], ranks: int) -> str:
    return " ".join(label(value, ranks)[0] or "-" for value in cells)


@REGISTRY
def mesh_groups(shape: tuple[int, ...], axes: str, axis: str) -> str:
    """The ranks of a mesh in planes of its last two axes; one colour a group."""
    from xtrain.comm.mesh import axis_ranks, mesh_coordinates

    names = axes.split(",")
    at = names.index(axis)
    full = (1,) * (2 - len(shape)) + tuple(shape)
    rows, columns = full[-2:]
    planes = prod(full[:-2])
    groups = [tuple(axis_ranks(r, shape, at)) for r in range(prod(shape))]
    order = list(dict.fromkeys(groups))
    left, top = 10, 28
    parts = [text(left, 16, f"groups of {axis}", "xt-label")]
    for rank, group in enumerate(groups):
        plane, inside = divmod(rank, rows * columns)
        row, column = divmod(inside, columns)
        x = left + plane * (columns * CELL + 24) + column * CELL
        parts += drawn(x, top + row * ROW, str(rank), order.index(group) % 7)
    places = "; ".join(
        f"rank {r} at {mesh_coordinates(r, shape)}" for r in range(prod(shape))
    )
    width = int(max(300, left + planes * (columns * CELL + 24)))
    title = f"{axis} groups of the mesh {shape}: {', '.join(map(str, order))}"
    return fit(document(width, top + rows * ROW + 6, parts, title, places), width)
