"""Column and row layers against `nn.Linear`: outputs, all gradients, what they send."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    mine,
    on_group,
    our_collectives,
    random_of,
)
from xtrain.comm import CommLedger
from xtrain.comm.autograd import identity_sum
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.functions import column_linear, row_linear

COLUMN = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
ROW = "xtrain.tensor_parallel.linear:RowParallelLinear"
FUNCTIONS = [
    "xtrain.tensor_parallel.functions:column_linear",
    "xtrain.tensor_parallel.functions:row_linear",
    "xtrain.tensor_parallel.functions:_ColumnLinear",
    "xtrain.tensor_parallel.functions:_RowLinear",
]


def layers(dense, group, sequence: bool):
    """(layer, dim of which a rank gets a slice of x, and of y); None for the whole."""
    for gather, overlap in itertools.product((False, True), repeat=2):
        options = {"gather_output": gather, "overlap": overlap}
        column = ColumnParallelLinear.from_full(dense, group, **options)
        yield column, None, None if gather else -1
    for split in (False, True):
        row = RowParallelLinear.from_full(dense, group, split_input=split)
        yield row, None if split else -1, None
    if sequence:
        yield from layers_of_sequence(dense, group)


def layers_of_sequence(dense, group, overlap=True):
    options = {"sequence_parallel": True, "overlap": overlap}
    yield ColumnParallelLinear.from_full(dense, group, **options), -2, -1
    yield RowParallelLinear.from_full(dense, group, **options), -1, -2


def compare(dense, shape, group, layers) -> None:
    """The outputs and all gradients of `layers` with those of `dense`."""
    x = random_of(3, *shape, dense.in_features).requires_grad_()
    grad = random_of(4, *shape, dense.out_features)
    y = dense(x)
    y.backward(grad)

    def part(whole, dim):
        return whole.detach() if dim is None else mine(whole.detach(), dim, group)

    for layer, x_dim, y_dim in layers:
        local = part(x, x_dim).clone().requires_grad_()
        out = layer(local)
        close(out, part(y, y_dim), "y")
        out.backward(part(grad, y_dim))
        close(local.grad, part(x.grad, x_dim), "dX")
        close(layer.weight.grad, part(dense.weight.grad, layer.dim), "dW")
        if dense.bias is not None:
            bias_dim = 0 if layer.dim == 0 else None
            close(layer.bias.grad, part(dense.bias.grad, bias_dim), "db")


def against_dense(group) -> None:
    size = dist.get_world_size(group)
    for shape in ((5,), (3, size), (0, size), (1, 3 * size)):  # [T] or [B, S]
        for bias in (False, True):
            dense = fill(nn.Linear(2 * size, 3 * size, bias))
            compare(dense, shape, group, layers(dense, group, len(shape) == 2))


@pytest.mark.verifies(COLUMN, ROW, *FUNCTIONS)
@ON_GROUPS
def test_outputs_and_all_gradients_are_those_of_the_whole_layer(world, size, members):
    world(size).run(on_group, members, against_dense)


def train_a_pair(steps: int, options: dict) -> None:
    """Column, tanh, row: several steps of AdamW leave the slices of the whole pair."""
    size = dist.get_world_size()
    first, second = fill(nn.Linear(5, 4 * size)), fill(nn.Linear(4 * size, 3), 2)
    column = ColumnParallelLinear.from_full(first, **options)
    row = RowParallelLinear.from_full(second, **options)
    whole = nn.Sequential(first, nn.Tanh(), second)
    cut = nn.Sequential(column, nn.Tanh(), row)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, cut)]
    for step in range(steps):
        x = random_of(10 + step, 3, 2 * size, 5)
        target = random_of(50 + step, 3, 2 * size, 3)
        losses = []
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            if model is cut and options:
                x, target = mine(x, 1), mine(target, 1)
            optimizer.zero_grad()
            loss = (model(x) - target).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if options:  # of this rank's slice of the sequence
            dist.all_reduce(losses[1])
        close(losses[1], losses[0], f"loss of step {step}")
    close(column.weight, mine(first.weight, 0), "column weight")
    close(column.bias, mine(first.bias, 0), "column bias")
    close(row.weight, mine(second.weight, 1), "row weight")
    close(row.bias, second.bias, "row bias")


RING = {"sequence_parallel": True, "overlap": "ring"}


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.verifies("xtrain.tensor_parallel.ring_matmul:ring_all_gather_matmul")
@pytest.mark.verifies("xtrain.tensor_parallel.ring_matmul:ring_matmul_reduce_scatter")
@pytest.mark.parametrize("options", [{}, RING], ids=["whole", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_optimizer_steps_are_those_of_the_whole_pair(world, size, options):
    world(size).run(train_a_pair, 4, options)


def refusals() -> None:
    size = dist.get_world_size()
    with pytest.raises(ValueError, match=r"out_features: 7 is not divisible by 2"):
        ColumnParallelLinear(4, 7)
    with pytest.raises(ValueError, match=r"in_features: 7 is not divisible by 2"):
        RowParallelLinear(7, 4)
    with pytest.raises(ValueError, match="neither a weight"):
        ColumnParallelLinear.from_full(nn.Tanh())
    column = ColumnParallelLinear(4, 2 * size)
    for sequence_parallel in (False, True):
        layer = ColumnParallelLinear(4, 6, sequence_parallel=sequence_parallel)
        with CommLedger() as ledger:
            with pytest.raises(
                ValueError, match=r"input NoneType, expected \[..., 4\]"
            ):
                layer(None)
            with pytest.raises(
                ValueError, match=r"float64 and the weight torch.float32"
            ):
                layer(torch.ones(2, 3, 4, dtype=torch.float64))
        assert not ledger.events, "nothing was gathered before"
    with pytest.raises(ValueError, match=r"input \[3, 5\], expected \[..., 4\]"):
        column(torch.ones(3, 5))
    row = RowParallelLinear(4, 6)
    with pytest.raises(ValueError, match=r"input \[3, 4\], expected \[..., 2\]"):
        row(torch.ones(3, 4))
    rows = RowParallelLinear(4, 6, sequence_parallel=True)
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        rows(torch.ones(1, 3, 2))


@pytest.mark.verifies(COLUMN, ROW)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(world):
    world(2).run(refusals)


@our_collectives()
def one_sum_for_several_weights() -> tuple[int, int]:
    """Bytes of backward with one weight and with three, of sequence slices."""
    sent = []
    for number in (1, 3):
        x = torch.ones(1, 4, 6, requires_grad=True)
        weights = [torch.ones(2, 6, requires_grad=True) for _ in range(number)]
        outputs = column_linear(x, weights, sequence_dim=1)
        with CommLedger() as ledger:
            sum(y.sum() for y in outputs).backward()
        sent.append(ledger.bytes_sent)
    return sent[0], sent[1]


@pytest.mark.verifies(FUNCTIONS[0])
def test_weights_that_read_the_same_input_share_one_sum(world):
    for one, three in world(2).run(one_sum_for_several_weights):
        assert one == three > 0


def starts_equal_whatever_the_number_of_ranks() -> None:
    torch.manual_seed(5)
    dense = nn.Linear(12, 24)
    torch.manual_seed(5)
    layer = ColumnParallelLinear(12, 24)
    assert torch.equal(layer.weight, mine(dense.weight, 0))
    assert torch.equal(layer.bias, mine(dense.bias, 0))
    torch.manual_seed(5)
    row = RowParallelLinear(12, 24)
    assert torch.equal(row.weight, mine(dense.weight, 1))
    assert torch.equal(row.bias, dense.bias)
    size = dist.get_world_size()
    shapes = [list(module.weight.shape) for module in (dense, layer, row)]
    assert shapes == [[24, 12], [24 // size, 12], [24, 12 // size]]


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_new_layer_is_cut_from_the_one_that_torch_would_draw(world, size):
    world(size).run(starts_equal_whatever_the_number_of_ranks)


def used_differently(weight):
    """A weight that all ranks hold, each of which multiplies it by something else."""
    members = list(range(dist.get_world_size()))
    return identity_sum(weight, members) * random_of(20 + dist.get_rank(), 2, 3)


def no_second_derivative() -> None:
    """Of the matmuls, whole and in slices of the sequence, and of `identity_sum`."""
    x, wide = random_of(1, 1, 2, 4), random_of(2, 1, 4, 3)
    first, second, weight = (random_of(n, 4, 4) for n in (3, 4, 5))
    cases = [(used_differently, (random_of(6, 2, 3),))]
    for dim in (None, 1):
        for overlap in (True, False):
            columns = partial(several_columns, dim=dim, overlap=overlap)
            cases.append((columns, (x, first, second)))
        rows = partial(row_linear, sequence_dim=dim)
        cases.append((rows, (wide, weight[:, :3].contiguous())))
    for function, inputs in cases:
        leaves = [one.clone().requires_grad_() for one in inputs]
        total = function(*leaves).pow(3).sum()
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="trying to differentiate twice a funct"):
            gradients[-1].sum().backward()


def several_columns(x, *weights, dim, overlap):
    return sum(column_linear(x, weights, dim, overlap))


@pytest.mark.verifies(*FUNCTIONS[:2], "xtrain.comm.autograd:identity_sum")
def test_a_second_derivative_is_refused(world):
    world(2).run(no_second_derivative)
