"""The groups of a mesh as a drawing."""

from math import prod

from xtrain.comm.mesh import axis_ranks, mesh_coordinates

from ...figures import REGISTRY
from ...svg import cell, document, text

CELL, ROW, LEFT, TOP = 36, 30, 10, 28


@REGISTRY
def mesh_groups(shape: tuple[int, ...], axes: str, axis: str) -> str:
    """The ranks of a mesh in planes of its last two axes; one colour a group."""
    rows, columns = shape[-2:]
    ranks, wide = range(prod(shape)), columns * CELL + 24
    at = axes.split(",").index(axis)
    groups = [tuple(axis_ranks(rank, shape, at)) for rank in ranks]
    order = list(dict.fromkeys(groups))
    parts = [text(LEFT, 16, f"groups of {axis}", "xt-label")]
    for rank, group in enumerate(groups):
        plane, inside = divmod(rank, rows * columns)
        row, column = divmod(inside, columns)
        x, y = LEFT + plane * wide + column * CELL, TOP + row * ROW
        colour = order.index(group) % 7
        parts += cell(x, y, CELL - 4, ROW - 4, colour, str(rank), radius=5, low=5)
    places = "; ".join(f"rank {r} at {mesh_coordinates(r, shape)}" for r in ranks)
    width = max(300, LEFT + prod(shape[:-2]) * wide)
    title = f"{axis} groups of the mesh {shape}: {', '.join(map(str, order))}"
    return document(width, TOP + rows * ROW + 6, parts, title, places)
