"""The pieces of a ring against one all-gather or reduce-scatter: results and bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tensor_parallel import test_linear
from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    on_group,
    our_collectives,
    random_of,
)
from tests.tensor_parallel.test_linear import RING, layers_of_sequence
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger, Work, debug_checks, ring_pass
from xtrain.comm.p2p import post_all
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelSwiGLU,
    RowParallelLinear,
    ring_all_gather_matmul,
    ring_matmul_reduce_scatter,
)
from xtrain.tensor_parallel.functions import column_linear, row_linear

COLUMN = "xtrain.tensor_parallel.ring_matmul:ring_all_gather_matmul"
ROW = "xtrain.tensor_parallel.ring_matmul:ring_matmul_reduce_scatter"
PARTS = [
    "xtrain.comm.ring_pass:RingPass",
    "xtrain.tensor_parallel.ring_matmul:ring_sum",
]


def against_dense(group) -> None:
    size = dist.get_world_size(group)
    for shape, bias in (((size,), False), ((3, size), True), ((1, 3 * size), False)):
        dense = fill(nn.Linear(2 * size, 3 * size, bias))
        rings = layers_of_sequence(dense, group, "ring")
        test_linear.compare(dense, shape, group, rings)


@pytest.mark.verifies(COLUMN, ROW, *PARTS)
@ON_GROUPS
def test_pieces_on_a_ring_make_the_whole_layer(world, size, members):
    world(size).run(on_group, members, against_dense)


def like_the_plain_form(dtype: torch.dtype) -> None:
    """Any sequence dim, several weights, frozen ones; along dim 0, 1 and -2."""
    size = dist.get_world_size()
    for dim, shape in ((0, (2, 3, 5)), (1, (3, 2, 5)), (-2, (2, 3, 1, 5))):
        results = []
        for overlap in (True, "ring"):
            x = random_of(1 + dist.get_rank(), *shape, dtype=dtype).requires_grad_()
            weights = [random_of(n, 4, 5, dtype=dtype) for n in (7, 8, 9)]
            weights = [w.requires_grad_(n != 1) for n, w in enumerate(weights)]
            outs = column_linear(x, weights, dim, overlap)
            (2 * outs[0] + outs[1] * outs[2]).sum().backward()
            grads = [x.grad, weights[0].grad, weights[2].grad]
            back = random_of(5, 5, 4, dtype=dtype).requires_grad_()
            inner = outs[0].detach().requires_grad_()
            y = row_linear(inner, back, dim, overlap)
            assert y.shape == x.shape
            y.square().sum().backward()
            grads += [inner.grad, back.grad]
            results.append([*outs, y, *grads])
            assert weights[1].grad is None
            assert {t.dtype for t in results[-1]} == {dtype}
        for plain, ring in zip(*results, strict=True):
            if dtype == torch.float64:
                close(ring, plain)
            else:
                error = (ring - plain).abs().max() / plain.abs().max()
                assert error < size * 2**-8  # a rounding of bfloat16 at each rank
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    ring_all_gather_matmul(x, [weight], 0)[0].sum().backward()  # no dW
    close(x.grad, torch.full((2, 3), 4.0 * size))
    x, weight = torch.ones(size, 3), torch.ones(4, 3, requires_grad=True)
    ring_matmul_reduce_scatter(x, weight, 0).sum().backward()  # no dX
    close(weight.grad, torch.full((4, 3), float(size)))


@pytest.mark.verifies(COLUMN, ROW, *PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_rings_compute_what_the_plain_form_does(world, size, dtype):
    world(size).run(like_the_plain_form, dtype)


@our_collectives()
def bytes_of_a_pair(overlap) -> list[tuple[int, int]]:
    """(sent, received) of column and row, forward and backward, one after the other."""
    size = dist.get_world_size()
    counted = []
    x = torch.ones(2, 12 // size, 6, requires_grad=True)
    weight = torch.ones(2, 6, requires_grad=True)
    inner = torch.ones(2, 12, 2, requires_grad=True)
    back = torch.ones(6, 2, requires_grad=True)

    def counting(call):
        with CommLedger() as ledger:
            result = call()
        counted.append((ledger.bytes_sent, ledger.bytes_received))
        return result

    (y,) = counting(lambda: column_linear(x, [weight], 1, overlap))
    counting(y.sum().backward)
    z = counting(lambda: row_linear(inner, back, 1, overlap))
    counting(z.sum().backward)
    return counted


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_sends_the_bytes_of_the_calls_it_takes_to_pieces(world, size):
    """Per layer a gather or a scatter; the column's backward one of each."""
    one = 2 * 12 * 6 * 4 * (size - 1) // size
    expected = [(n * one, n * one) for n in (1, 2, 1, 1)]
    ranks = world(size)
    assert ranks.run(bytes_of_a_pair, "ring") == [expected] * size
    assert ranks.run(bytes_of_a_pair, True) == [expected] * size


class Order(TorchDispatchMode):
    """Matmuls, and when messages are issued and waited for, in their order."""

    def __init__(self):
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.startswith("mm"):
            self.events.append("mm")
        return function(*args, **(kwargs or {}))

    def post_all(self, *messages):
        self.events.append("issue")
        works = post_all(*messages)
        return [Work(works, lambda: self.events.append("wait"))]


def order_of_events() -> list[list[str]]:
    size, seen = dist.get_world_size(), []
    x = torch.ones(2, 5, requires_grad=True)
    weight = torch.ones(4, 5, requires_grad=True)
    inner = torch.ones(2 * size, 4, requires_grad=True)
    back = torch.ones(5, 4, requires_grad=True)
    for forward in (
        lambda: ring_all_gather_matmul(x, [weight], 0)[0],
        lambda: ring_matmul_reduce_scatter(inner, back, 0),
    ):
        for phase in ("forward", "backward"):
            with Order() as order, replaced(ring_pass, "post_all", order.post_all):
                if phase == "forward":
                    y = forward()
                else:
                    y.sum().backward()
            seen.append(order.events)
    return seen


@pytest.mark.verifies(COLUMN, ROW, *PARTS)
def test_every_piece_travels_while_the_one_before_is_multiplied(world):
    step = ["issue", "mm", "wait"]
    gather, scatter = [*step, *step, "mm"], ["mm", *step, *step]
    twice = ["issue", "mm", "mm", "wait"] * 2 + ["mm", "mm"]  # dX and dW
    expected = [gather, scatter + gather, scatter, twice]
    assert world(3).run(order_of_events) == [expected] * 3


def refusals() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for layer in (ColumnParallelLinear, RowParallelLinear, ParallelSwiGLU):
        with pytest.raises(ValueError, match="overlap='rings' is not True, False or"):
            layer(4, 2 * size, sequence_parallel=True, overlap="rings")
        with pytest.raises(ValueError, match="overlap='ring' is for sequence_parallel"):
            layer(4, 2 * size, overlap="ring")
    with pytest.raises(ValueError, match="overlap='ring' is for sequence_parallel"):
        ParallelAttention(4, 4, 2, 2, overlap="ring")
    x, weight = torch.ones(1, 3, 2), torch.ones(4, 2)
    for call in (
        lambda dim: ring_all_gather_matmul(x, [weight], dim),
        lambda dim: ring_matmul_reduce_scatter(x, weight, dim),
    ):
        for dim in (2, -1, 3, -4):
            with pytest.raises(ValueError, match=f"dim={dim} is not a dim before"):
                call(dim)
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        ring_matmul_reduce_scatter(x, weight, 1)
    row = RowParallelLinear(4, 6, **RING)
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        row(x)
    with debug_checks(), pytest.raises(ValueError, match="one and the same legal call"):
        ring_all_gather_matmul(torch.ones(2 + rank, 2), [weight], 0)


@pytest.mark.verifies(COLUMN, ROW)
def test_bad_input_is_refused_on_all_ranks(world):
    world(2).run(refusals)


def no_second_derivative() -> None:
    x, size = torch.ones(2, 4, requires_grad=True), dist.get_world_size()
    for forward in (
        lambda x: ring_all_gather_matmul(x, [torch.ones(4, 4)], 0)[0],
        lambda x: ring_matmul_reduce_scatter(x, torch.ones(4, 4), 0),
    ):
        assert forward(x).shape[0] in (2 * size, 2 // size)
        (grad,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.verifies(COLUMN, ROW)
def test_a_second_derivative_is_refused(world):
    world(2).run(no_second_derivative)
