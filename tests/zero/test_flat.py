"""Shards of any shapes over any number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.zero import FlatLayout

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(torch.Size), max_size=8)


@pytest.mark.verifies("xtrain.zero.flat:FlatLayout")
@given(shapes, st.integers(1, 20))
def test_shards_laid_end_to_end_are_the_flat_vector(shapes, size):
    layout = FlatLayout(shapes, size)
    flat = torch.arange(layout.padded_numel)
    assert layout.numel == sum(shape.numel() for shape in shapes)
    assert 0 <= layout.padded_numel - layout.numel < size
    shards = [layout.shard(flat, rank) for rank in range(size)]
    assert {len(shard) for shard in shards} == {layout.shard_numel}
    assert torch.equal(torch.cat(shards), flat)


@pytest.mark.verifies("xtrain.zero.flat:FlatLayout")
@given(shapes, st.integers(1, 20))
def test_pieces_cover_every_tensor_once(shapes, size):
    layout = FlatLayout(shapes, size)
    flat = torch.arange(layout.padded_numel)
    views = layout.views(flat)
    assert [view.shape for view in views] == shapes
    by_rank = [layout.pieces(layout.shard(flat, r), r) for r in range(size)]
    for number, (view, slot) in enumerate(zip(views, layout.slots, strict=True)):
        pieces = [pieces[number] for pieces in by_rank]
        assert torch.equal(torch.cat(pieces), view.reshape(-1))
        end = 0
        for rank, piece in enumerate(pieces):
            start, stop = layout.piece_bounds(slot, rank)
            assert stop - start == len(piece)
            if len(piece):
                assert start == end
                end = stop
                assert torch.equal(view.reshape(-1)[start:stop], piece)
        assert end == slot.stop - slot.start


@pytest.mark.verifies("xtrain.zero.flat:FlatLayout")
@given(shapes, st.integers(1, 9))
def test_views_and_pieces_share_memory(shapes, size):
    layout = FlatLayout(shapes, size)
    flat = torch.zeros(layout.padded_numel)
    for view in layout.views(flat):
        view.fill_(1)
    for rank in range(size):
        for piece in layout.pieces(layout.shard(flat, rank), rank):
            piece += 1
    assert flat[: layout.numel].eq(2).all()
    assert flat[layout.numel :].eq(0).all()
