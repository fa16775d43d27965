"""The map of collectives: the cells of every rank before and after one."""

import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.comm.collective_kinds import kind_of, prepare

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, rect, text
from ...traces.record import decode, encode

CELL, ROW, GAP, LEFT, TOP = 36, 30, 40, 56, 30


def cells(name: str) -> list[list[int]]:
    """This rank's cells before and after a collective, as telling numbers."""
    rank, size, kind = dist.get_rank(), dist.get_world_size(), kind_of(name)
    places = [0] * size if kind in ("gather", "all_gather") else range(size)
    whole = torch.tensor([encode(rank, place) for place in places])
    call = prepare(kind, getattr(comm, name), whole)
    before = call.given.tolist()
    call.run()
    return [before, call.result.tolist()]


@REGISTRY
def before_after(name: str, ranks: int = 4) -> str:
    """The cells of every rank before and after a collective, from a real run."""
    found = runs.remembered(cells, ranks, name)
    widest = [max(len(sides[side]) for sides in found) for side in (0, 1)]
    second = LEFT + widest[0] * CELL + GAP
    parts = [text(LEFT, 16, "before", "xt-tick"), text(second, 16, "after", "xt-tick")]
    for rank, sides in enumerate(found):
        y = TOP + rank * ROW
        parts.append(text(LEFT - 8, y + 18, f"rank {rank}", "xt-tick", "end"))
        for start, held in zip((LEFT, second), sides, strict=True):
            for place, value in enumerate(held):
                parts += drawn(start + place * CELL, y, *label(value, ranks))
    middle, bottom = second - GAP / 2 - 2, TOP + ranks * ROW
    parts.append(text(middle, (TOP + bottom) / 2 + 4, "\u2192", "xt-label", "middle"))
    told = [
        [" ".join(label(v, ranks)[0] or "-" for v in held) for held in sides]
        for sides in found
    ]
    words = "; ".join(
        f"rank {rank}: {old} becomes {new}" for rank, (old, new) in enumerate(told)
    )
    title = f"{name} on {ranks} ranks, before and after"
    width = second + max(widest[1], 2) * CELL + 6
    return document(width, bottom + 6, parts, title, words)


def label(value: int, ranks: int) -> tuple[str, int]:
    """What a cell holds, as text and the number of its colour.

    Raises ValueError for a sum of some ranks only.
    """
    if not (found := decode(value)):
        return "", -1
    place, owners = found
    if len(owners) not in (1, ranks):
        raise ValueError(f"a sum of ranks {owners} only")
    if len(owners) == 1:
        return f"{'abcd'[owners[0]]}{place}", owners[0]
    return f"\u03a3{place}", 7


def drawn(x: float, y: float, words: str, colour: int) -> list[str]:
    """A cell with its words; an empty one is dashed."""
    if colour < 0:
        return [rect(x, y, CELL - 4, ROW - 4, None, radius=5, dashes="2 4")]
    return cell(x, y, CELL - 4, ROW - 4, colour, words, radius=5, low=5)
