"""Column and row layers against `nn.Linear`: outputs, all gradients, what they send."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tensor_parallel.dense import (
    close,
    fill,
    mine,
    our_collectives,
    random_of,
    sub_group,
)
from xtrain.comm import CommLedger
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.functions import column_linear

COLUMN = "xtrain.tensor_parallel.linear:ColumnParallelLinear"
ROW = "xtrain.tensor_parallel.linear:RowParallelLinear"
FUNCTIONS = [
    "xtrain.tensor_parallel.functions:column_linear",
    "xtrain.tensor_parallel.functions:row_linear",
    "xtrain.tensor_parallel.functions:_ColumnLinear",
    "xtrain.tensor_parallel.functions:_RowLinear",
]


def run_dense(dense: nn.Module, x, grad):
    """Output and gradients of the whole layer; `grad` is that of its output."""
    dense.zero_grad()
    x = x.clone().requires_grad_()
    y = dense(x)
    y.backward(grad)
    return y.detach(), x.grad


def against_dense(members=None) -> None:
    group = sub_group(members) if members else None
    if members and group is None:
        return
    size = dist.get_world_size(group)
    features, outputs = 2 * size, 3 * size
    for shape in ((5,), (3, size), (0, size), (1, 3 * size)):  # [T] or [B, S]
        for bias in (False, True):
            dense = fill(nn.Linear(features, outputs, bias))
            x = random_of(3, *shape, features)
            grad = random_of(4, *shape, outputs)
            y, grad_x = run_dense(dense, x, grad)
            column(dense, x, y, grad, grad_x, group)
            row(dense, x, y, grad, grad_x, group)
            if len(shape) == 2:
                column_of_sequence(dense, x, y, grad, grad_x, group)
                row_of_sequence(dense, x, y, grad, grad_x, group)


def column(dense, x, y, grad, grad_x, group) -> None:
    for gather in (False, True):
        for overlap in (False, True):
            layer = ColumnParallelLinear.from_full(
                dense, group, gather_output=gather, overlap=overlap
            )
            local = x.clone().requires_grad_()
            out = layer(local)
            close(out, y if gather else mine(y, -1, group), "y")
            out.backward(grad if gather else mine(grad, -1, group))
            close(local.grad, grad_x, "dX")
            check_column_gradients(layer, dense, group)


def column_of_sequence(dense, x, y, grad, grad_x, group) -> None:
    layer = ColumnParallelLinear.from_full(dense, group, sequence_parallel=True)
    local = mine(x, -2, group).clone().requires_grad_()
    out = layer(local)
    close(out, mine(y, -1, group), "y")
    out.backward(mine(grad, -1, group))
    close(local.grad, mine(grad_x, -2, group), "dX")
    check_column_gradients(layer, dense, group)


def check_column_gradients(layer, dense, group) -> None:
    close(layer.weight.grad, mine(dense.weight.grad, 0, group), "dW")
    if dense.bias is not None:
        close(layer.bias.grad, mine(dense.bias.grad, 0, group), "db")


def row(dense, x, y, grad, grad_x, group) -> None:
    for split in (False, True):
        layer = RowParallelLinear.from_full(dense, group, split_input=split)
        local = (x if split else mine(x, -1, group)).clone().requires_grad_()
        out = layer(local)
        close(out, y, "y")
        out.backward(grad)
        close(local.grad, grad_x if split else mine(grad_x, -1, group), "dX")
        check_row_gradients(layer, dense, group)


def row_of_sequence(dense, x, y, grad, grad_x, group) -> None:
    layer = RowParallelLinear.from_full(dense, group, sequence_parallel=True)
    local = mine(x, -1, group).clone().requires_grad_()
    out = layer(local)
    close(out, mine(y, -2, group), "y")
    out.backward(mine(grad, -2, group))
    close(local.grad, mine(grad_x, -1, group), "dX")
    check_row_gradients(layer, dense, group)


def check_row_gradients(layer, dense, group) -> None:
    close(layer.weight.grad, mine(dense.weight.grad, 1, group), "dW")
    if dense.bias is not None:
        close(layer.bias.grad, dense.bias.grad, "db")


@pytest.mark.verifies(COLUMN, ROW, *FUNCTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_outputs_and_all_gradients_are_those_of_the_whole_layer(world, size):
    world(size).run(against_dense)


@pytest.mark.verifies(COLUMN, ROW)
def test_layers_keep_to_their_group(world):
    world(4).run(against_dense, [1, 3])


def train_a_pair(steps: int) -> None:
    """Column, tanh, row: several steps of AdamW leave the slices of the whole pair."""
    size = dist.get_world_size()
    first, second = fill(nn.Linear(5, 4 * size)), fill(nn.Linear(4 * size, 3), 2)
    column, row = (
        ColumnParallelLinear.from_full(first),
        RowParallelLinear.from_full(second),
    )
    whole = nn.Sequential(first, nn.Tanh(), second)
    cut = nn.Sequential(column, nn.Tanh(), row)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, cut)]
    for step in range(steps):
        x, target = random_of(10 + step, 7, 5), random_of(50 + step, 7, 3)
        losses = []
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(losses[1], losses[0], f"loss of step {step}")
    close(column.weight, mine(first.weight, 0), "column weight")
    close(column.bias, mine(first.bias, 0), "column bias")
    close(row.weight, mine(second.weight, 1), "row weight")
    close(row.bias, second.bias, "row bias")


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_optimizer_steps_are_those_of_the_whole_pair(world, size):
    world(size).run(train_a_pair, 4)


@our_collectives()
def bytes_of_a_pair(sequence_parallel: bool) -> tuple[int, int]:
    """Forward and backward of column and row, by our collectives."""
    size = dist.get_world_size()
    hidden, inner = 6, 2 * size
    column = ColumnParallelLinear(
        hidden, inner, bias=False, sequence_parallel=sequence_parallel
    )
    row = RowParallelLinear(
        inner, hidden, bias=False, sequence_parallel=sequence_parallel
    )
    x = torch.ones(2, 12 // size if sequence_parallel else 12, hidden)
    x.requires_grad_()
    with CommLedger() as ledger:
        y = row(column(x))
    forward = ledger.bytes_sent
    with CommLedger() as ledger:
        y.sum().backward()
    return forward, ledger.bytes_sent


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_pair_of_sequence_slices_sends_five_half_all_reduces(world, size):
    """A gather and a scatter forward; backward those, and x is gathered once more."""
    half = 2 * 12 * 6 * 4 * (size - 1) // size
    assert world(size).run(bytes_of_a_pair, True) == [(2 * half, 3 * half)] * size


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
    assert row.weight.shape == (24, 12 // dist.get_world_size())


@pytest.mark.verifies(COLUMN, ROW)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_new_layer_is_cut_from_the_one_that_torch_would_draw(world, size):
    world(size).run(starts_equal_whatever_the_number_of_ranks)


def no_second_derivative() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(
        ColumnParallelLinear(4, 4)(x).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.verifies(FUNCTIONS[0])
def test_a_second_derivative_is_refused(world):
    world(2).run(no_second_derivative)
