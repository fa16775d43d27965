"""Boxes: n-dimensional parts of a tensor, each an offset and a size in every dim.

    rows, an expert         columns                 a range of the flattened tensor

    . . . . . .             . . # # . .             . . . . # #    tail of a row
    # # # # # #             . . # # . .             # # # # # #    whole rows
    # # # # # #             . . # # . .             # # # . . .    head of a row
    one box                 one box                 2 * dims - 1 boxes at most

One description covers every way to shard; converting between two is a matter of
overlapping boxes.
"""

import math
from bisect import bisect_left, insort
from typing import NamedTuple


class Box(NamedTuple):
    """Elements offset[d] to offset[d] + size[d] in each dim d."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def moved_by(self, offset: tuple[int, ...]) -> "Box":
        """A box of as many elements, further on by `offset`."""
        return Box(
            tuple(o + more for o, more in zip(self.offset, offset, strict=True)),
            self.size,
        )

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in the tensor that an outer box's elements make."""
        lows = (
            mine - base for mine, base in zip(self.offset, outer.offset, strict=True)
        )
        return tuple(
            slice(low, low + size) for low, size in zip(lows, self.size, strict=True)
        )


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that both have; None if they have none in common."""
    offset = tuple(map(max, a.offset, b.offset))
    size = tuple(
        end - low for end, low in zip(map(min, a.end, b.end), offset, strict=True)
    )
    return Box(offset, size) if all(s > 0 for s in size) else None


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements start to stop of the flattened tensor as boxes, in that order.

    Laid end to end, the boxes' elements are the range.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = shape[1:]
    row = math.prod(inner)  # elements of one index of the first dim
    first, last = -(-start // row), stop // row  # whole rows
    if last < first:  # begins and ends within one row
        within = boxes_of_range(inner, start - last * row, stop - last * row)
        return [in_row(last, box) for box in within]
    head = boxes_of_range(inner, start - (first - 1) * row, row) if start % row else []
    rows = [Box((first, *[0] * len(inner)), (last - first, *inner))]
    tail = boxes_of_range(inner, 0, stop - last * row)
    return [
        *(in_row(first - 1, box) for box in head),
        *(rows if first < last else []),
        *(in_row(last, box) for box in tail),
    ]


def in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.size))


# -- do boxes cover a tensor?


def covering_problem(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """What keeps boxes within a shape from having each element once; None if they do.

    Boxes that do not overlap, and have as many elements as the tensor, are all of it.
    """
    if pair := overlapping_pair(shape, boxes):
        common = overlap(*pair)
        assert common is not None
        return f"two pieces have element {list(common.offset)}"
    if sum(box.numel for box in boxes) < math.prod(shape):
        return f"element {list(first_missing(shape, boxes) or ())} is in no piece"
    return None


def overlapping_pair(
    shape: tuple[int, ...], boxes: list[Box]
) -> tuple[Box, Box] | None:
    """Two boxes with a common element, if there are any.

    A sweep along the dim with the most offsets: a box is compared with those only that
    have not ended yet.
    """
    if not shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    dims = range(len(shape))
    dim = max(dims, key=lambda d: len({box.offset[d] for box in boxes}))
    open_boxes: list[tuple[int, Box]] = []  # by where they end
    for box in sorted(boxes, key=lambda box: box.offset[dim]):
        del open_boxes[: bisect_left(open_boxes, (box.offset[dim] + 1,))]
        for _, other in open_boxes:
            if overlap(box, other):
                return other, box
        insort(open_boxes, (box.end[dim], box))
    return None


def first_missing(shape: tuple[int, ...], boxes: list[Box]) -> tuple[int, ...] | None:
    """The first element, in the order of the flattened tensor, that is in no box."""
    if not shape:
        return None if boxes else ()
    edges = {0, *(b.offset[0] for b in boxes), *(b.end[0] for b in boxes)}
    for row in sorted(edges - {shape[0]}):
        here = [
            Box(b.offset[1:], b.size[1:])
            for b in boxes
            if b.offset[0] <= row < b.end[0]
        ]
        if (rest := first_missing(shape[1:], here)) is not None:
            return (row, *rest)
    return None
