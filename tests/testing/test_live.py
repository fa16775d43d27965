"""Storages are counted from the operation that makes them until they are gone."""

import torch

from xtrain.testing.live import LiveStorages


def test_what_is_gone_counts_no_more_and_the_most_stays():
    known = torch.ones(10)
    with LiveStorages([known]) as live:
        a = known + 1
        assert live.now == 2 * known.nbytes
        b = a * 2
        del a
        assert live.now == 2 * known.nbytes
        c = known[:1] + 1
        assert live.now == 2 * known.nbytes + c.nbytes
    assert live.most == 3 * known.nbytes
    del b, c
    assert live.now == known.nbytes


def test_views_count_as_their_storage_and_some_tensors_can_be_left_out():
    outside = torch.ones(6)
    with LiveStorages() as live:
        a = outside + 1
        first, rest = a.split([2, 4])
        b = rest + first.sum()
    total = a.nbytes + b.nbytes
    assert live.nbytes() == total
    assert live.nbytes(but=[first, rest]) == b.nbytes
    assert live.nbytes(but=[outside, b, b]) == a.nbytes
    del a, first
    assert live.now == total, "a view is left"
    del rest
    assert live.now == b.nbytes
