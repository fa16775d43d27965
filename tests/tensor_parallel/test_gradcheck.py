"""The autograd functions of tensor parallelism against finite differences.

gradcheck moves the inputs of each rank by itself. So the inputs here are replicated and
all ranks move alike; what a rank needs of them is cut inside the function that is
checked, by functions that tests/comm/test_autograd.py checks. The fast mode compares
u^T J v for two random vectors, which are the same on all ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.tensor_parallel.dense import mine, random_of
from xtrain.comm.autograd import (
    all_gather_split,
    all_reduce_identity,
    identity_sum,
    split_all_gather,
)
from xtrain.tensor_parallel import vocab_parallel_cross_entropy
from xtrain.tensor_parallel.functions import column_linear, row_linear

COLUMN = "xtrain.tensor_parallel.functions:column_linear"
ROW = "xtrain.tensor_parallel.functions:row_linear"
SUM = "xtrain.comm.autograd:identity_sum"
LOSS = "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
ONCE = "trying to differentiate twice a function that was marked"


def columns(x: Tensor, first: Tensor, second: Tensor, dim=None, overlap=True) -> Tensor:
    """Two weights that read one x; the outputs put together again."""
    x = x if dim is None else split_all_gather(x, dim)
    weights = [split_all_gather(weight, 0) for weight in (first, second)]
    outputs = column_linear(x, weights, dim, overlap)
    return sum(all_gather_split(y, -1) for y in outputs)


def rows(x: Tensor, weight: Tensor, dim=None) -> Tensor:
    """This rank's features and columns; the slices of a sequence put together again."""
    y = row_linear(split_all_gather(x, -1), split_all_gather(weight, 1), dim)
    return y if dim is None else all_gather_split(y, dim)


def used_differently(weight: Tensor) -> Tensor:
    """A weight that all ranks hold, each of which multiplies it by something else."""
    members = list(range(dist.get_world_size()))
    factor = random_of(20 + dist.get_rank(), *weight.shape)
    return all_reduce_identity(identity_sum(weight, members) * factor)


def linear_functions():
    """(function, replicated inputs), whole and in slices of the sequence."""
    size = dist.get_world_size()
    x, wide = random_of(1, 1, size, 3), random_of(2, 1, size, 2 * size)
    first, second = random_of(3, size, 3), random_of(4, size, 3)
    weight = random_of(5, 2, 2 * size)
    for dim in (None, 1):
        yield lambda *a, d=dim: columns(*a, dim=d), (x, first, second)
        yield lambda *a, d=dim: rows(*a, dim=d), (wide, weight)
    yield lambda *a: columns(*a, overlap=False), (x, first, second)
    yield used_differently, (random_of(6, 2, 3),)


def finite_differences() -> None:
    for function, inputs in linear_functions():
        leaves = [x.clone().requires_grad_() for x in inputs]
        assert torch.autograd.gradcheck(
            function, leaves, fast_mode=True, nondet_tol=1e-12
        )


@pytest.mark.verifies(COLUMN, ROW, SUM)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_the_matmuls_are_those_of_finite_differences(world, size):
    world(size).run(finite_differences)


def second_derivatives_refused() -> None:
    for function, inputs in linear_functions():
        leaves = [x.clone().requires_grad_() for x in inputs]
        total = function(*leaves).pow(3).sum()
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=ONCE):
            gradients[-1].sum().backward()


@pytest.mark.verifies(COLUMN, ROW, SUM)
def test_their_second_derivatives_are_refused_in_words(world):
    world(2).run(second_derivatives_refused)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(
        mine(logits, -1), labels, label_smoothing=0.1, z_loss=0.05, reduction="sum"
    )


def moved_one_by_one() -> None:
    """gradcheck itself goes backward twice, which this loss refuses."""
    size, step = dist.get_world_size(), 1e-5
    logits, labels = random_of(1, 3, 2 * size), torch.tensor([0, 2 * size - 1, -100])
    local = mine(logits, -1).clone().requires_grad_()
    vocab_parallel_cross_entropy(
        local, labels, label_smoothing=0.1, z_loss=0.05, reduction="sum"
    ).backward()
    found = torch.empty_like(logits)
    for place in range(logits.numel()):
        ends = []
        for sign in (1, -1):
            moved = logits.flatten().clone()
            moved[place] += sign * step
            ends.append(loss_of(moved.view_as(logits), labels))
        found.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(local.grad, mine(found, -1), rtol=1e-7, atol=1e-8)


@pytest.mark.verifies(LOSS)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_the_loss_are_those_of_finite_differences(world, size):
    world(size).run(moved_one_by_one)


def second_derivative_of_the_loss() -> None:
    """once_differentiable would not see it: the gradient of a loss is the constant 1,
    so the result would be cut off from its graph and nothing said."""
    logits = random_of(1, 3, 4).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.arange(3))
    with pytest.raises(RuntimeError, match="create_graph=True: .* no second deriv"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.verifies(LOSS)
def test_a_second_derivative_of_the_loss_is_refused_in_words(world):
    world(2).run(second_derivative_of_the_loss)
