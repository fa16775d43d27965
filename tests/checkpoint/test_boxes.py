"""Boxes against what they mean: sets of elements."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.checkpoint.boxes import Box, boxes_of_range, covering_problem, overlap
from xtrain.checkpoint.pieces import Piece, Shard
from xtrain.checkpoint.reader import copy_overlap
from xtrain.checkpoint.structure import Stored

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def elements(box):
    ranges = map(range, box.offset, box.end)
    return list(itertools.product(*ranges))


@st.composite
def boxes_within(draw, shape):
    bounds = [sorted(draw(st.tuples(*[st.integers(0, n - 1)] * 2))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))


@pytest.mark.verifies("xtrain.checkpoint.boxes:boxes_of_range")
@given(shape=shapes, data=st.data())
def test_a_range_is_its_boxes_end_to_end(shape, data):
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numel)] * 2)))
    boxes = boxes_of_range(shape, start, stop)
    in_order = list(itertools.product(*map(range, shape)))
    assert [e for box in boxes for e in elements(box)] == in_order[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    rest = [*boxes_of_range(shape, 0, start), *boxes_of_range(shape, stop, numel)]
    assert covering_problem(shape, [*rest, *boxes]) is None


def test_whole_rows_are_one_box_and_a_middle_is_all_that_it_can_be():
    assert boxes_of_range((4, 3), 3, 9) == [Box((1, 0), (2, 3))]
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((0, 3), 0, 0) == []
    assert len(boxes_of_range((3, 3, 3, 3), 1, 80)) == 7


@given(shape=shapes, data=st.data())
def test_a_flat_shard_has_its_elements_where_they_are_in_the_tensor(shape, data):
    full = torch.arange(math.prod(shape)).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, full.numel())] * 2)))
    shard = Shard("x", shape, start, full.flatten()[start:stop].clone())
    for piece in shard.pieces():
        inside = piece.box.slices_in(Box((0,) * len(shape), shape))
        assert torch.equal(piece.data, full[inside])
        piece.data.fill_(-1)  # views: what is read into pieces is in the shard
    assert shard.tensor.eq(-1).all()


@pytest.mark.verifies(
    "xtrain.checkpoint.boxes:overlap", "xtrain.checkpoint.reader:copy_overlap"
)
@given(shape=shapes, data=st.data())
def test_what_two_boxes_share_is_copied_and_nothing_else(shape, data):
    wanted = data.draw(boxes_within(shape))
    full = torch.arange(1, 1 + math.prod(shape)).view(shape)
    if data.draw(st.booleans()):  # a box, or the boxes of a range as in format 1
        boxes = [data.draw(boxes_within(shape))]
    else:
        ends = sorted(data.draw(st.tuples(*[st.integers(0, full.numel())] * 2)))
        boxes = boxes_of_range(shape, *ends)
    inside = {e for box in boxes for e in elements(box)}
    flat = torch.tensor([full[e] for box in boxes for e in elements(box)])
    piece = Piece("x", shape, wanted.offset, torch.zeros(wanted.size, dtype=full.dtype))
    copy_overlap(piece, Stored("", "x", "", (), 0, tuple(boxes)), flat)
    expected = [full[e] if e in inside else 0 for e in elements(wanted)]
    assert piece.data.flatten().tolist() == expected
    for box in boxes:
        common = overlap(wanted, box)
        shared = set(elements(wanted)) & set(elements(box))
        assert set(elements(common) if common else []) == shared


@pytest.mark.verifies("xtrain.checkpoint.boxes:covering_problem")
@given(shape=shapes, data=st.data())
def test_boxes_cover_a_tensor_just_if_each_element_is_in_one(shape, data):
    """Boxes of a tensor that was cut, then one of them changed, or any boxes."""
    boxes = data.draw(cuts_of(shape))
    if data.draw(st.booleans()):
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    if data.draw(st.booleans()):
        boxes.append(data.draw(boxes_within(shape)))
    found = [e for box in boxes for e in elements(box)]
    missing = [e for e in itertools.product(*map(range, shape)) if e not in found]
    problem = covering_problem(shape, boxes)
    if len(set(found)) < len(found):
        assert problem and "two pieces have element" in problem
        named = json.loads(problem.rpartition("element ")[2])
        assert found.count(tuple(named)) > 1
    elif missing:
        assert problem == f"element {list(missing[0])} is in no piece"
    else:
        assert problem is None


@st.composite
def cuts_of(draw, shape):
    """A tensor cut in two, one of the parts again in two, and so on."""
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.size) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.size[dim] - 1))
        size, rest, offset = list(box.size), list(box.size), list(box.offset)
        size[dim], rest[dim] = at, box.size[dim] - at
        offset[dim] += at
        boxes += [Box(box.offset, tuple(size)), Box(tuple(offset), tuple(rest))]
    return boxes
