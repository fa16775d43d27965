"""What autograd saves is counted by storages, once each."""

import torch

from xtrain.testing.saved import SavedTensors, address


def test_a_product_saves_both_factors_and_a_sum_nothing():
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    with SavedTensors() as saved:
        y = x @ w
    assert saved.nbytes() == x.nbytes + w.nbytes
    assert saved.nbytes(but=[w]) == x.nbytes
    with SavedTensors() as saved:
        total = y.sum() + 1
    assert saved.nbytes() == 0
    total.backward()
    assert torch.equal(x.grad, torch.full((3, 4), 5.0))


def test_views_of_a_storage_count_once_and_as_a_whole():
    x = torch.ones(8, requires_grad=True)
    both = x * 1
    with SavedTensors() as saved:
        y = both[:2].exp() * both[6:].sin()
    results = 2 * 2 * 4  # of exp, which its backward needs, and of sin: two factors
    assert saved.nbytes() == both.nbytes + results
    assert address(both[6:]) in saved.storages
    y.sum().backward()
    assert x.grad.count_nonzero() == 4


def test_nothing_is_saved_without_gradients():
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad(), SavedTensors() as saved:
        x.exp()
    assert saved.nbytes() == 0 and not saved.storages


def test_what_is_saved_before_and_after_is_not_counted():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    with SavedTensors() as saved:
        y = y + 1
    y = y.cos()
    assert saved.nbytes() == 0
    y.sum().backward()
