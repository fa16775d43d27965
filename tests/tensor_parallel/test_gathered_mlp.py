"""The MLP that gathers after each layer: like the dense one, and what it sends."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from xtrain.tensor_parallel import (
    AllGatherMLP,
    ColumnParallelLinear,
    RowParallelLinear,
)

MLP = "xtrain.tensor_parallel.gathered_mlp:AllGatherMLP"


class Dense(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool, activation=F.gelu):
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.up_proj(x)))


def train(members=None) -> None:
    """Outputs, all gradients, and the weights after several steps."""
    group = sub_group(members) if members else None
    if members and group is None:
        return
    size = dist.get_world_size(group)
    for bias, activation in ((True, F.gelu), (False, F.relu)):
        dense = fill(Dense(2 * size, 3 * size, bias, activation))
        options = {"activation": activation, "overlap": bias}
        cut = AllGatherMLP.from_full(dense, group, **options)
        models = (dense, cut)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
        for step in range(3):
            x, grad = (random_of(n + step, 5, 3, 2 * size) for n in (10, 50))
            inputs = [x.clone().requires_grad_() for _ in models]
            outputs = [model(x) for model, x in zip(models, inputs, strict=True)]
            close(outputs[1], outputs[0], "y")
            for output, optimizer in zip(outputs, optimizers, strict=True):
                optimizer.zero_grad()
                output.backward(grad)
            close(inputs[1].grad, inputs[0].grad, "dX")
            for name, parameter in cut.named_parameters():
                full = dense.get_parameter(name)
                close(parameter.grad, mine(full.grad, 0, group), f"gradient of {name}")
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in cut.named_parameters():
            close(parameter, mine(dense.get_parameter(name), 0, group), name)


@pytest.mark.verifies(MLP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathering_after_each_layer_computes_the_dense_mlp(world, size):
    world(size).run(train)


@pytest.mark.verifies(MLP)
def test_the_mlp_keeps_to_its_group(world):
    world(4).run(train, [1, 2])


@our_collectives()
def bytes_of_both(hidden: int, tokens: int) -> list[tuple[int, int]]:
    """(forward, backward): gathering after each layer; column, then row."""
    gathered = AllGatherMLP(hidden, 4 * hidden)
    column = ColumnParallelLinear(hidden, 4 * hidden)
    pair = nn.Sequential(column, nn.GELU(), RowParallelLinear(4 * hidden, hidden))
    sent = []
    for model in (gathered, pair):
        x = torch.ones(tokens, hidden, requires_grad=True)
        with CommLedger() as ledger:
            y = model(x)
        forward = moved(ledger)
        with CommLedger() as ledger:
            y.sum().backward()
        sent.append((forward, moved(ledger)))
    return sent


def moved(ledger: CommLedger) -> int:
    """Bytes sent; the backend's own all-reduces by the least that they must send."""
    size = dist.get_world_size()
    foreign = [e for e in ledger.events if e.nbytes is None]
    assert {event.op for event in foreign} <= {"allreduce"}
    sums = sum(event.payload for event in foreign)
    return ledger.bytes_sent + 2 * sums * (size - 1) // size


@pytest.mark.verifies(MLP)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_sends_five_units_a_token_where_column_and_row_send_two(world, size):
    hidden, tokens = 12, 10
    unit = hidden * tokens * 4 * (size - 1) // size
    expected = [(5 * unit, 10 * unit), (2 * unit, 2 * unit)]
    assert world(size).run(bytes_of_both, hidden, tokens) == [expected] * size


def refusals() -> None:
    with pytest.raises(ValueError, match="out_features: 7 is not divisible by 2"):
        AllGatherMLP(4, 7)
    with pytest.raises(ValueError, match="Tanh has no up_proj"):
        AllGatherMLP.from_full(nn.Tanh())
    dense = Dense(4, 8, True)
    dense.down_proj = nn.Linear(8, 6)
    with pytest.raises(ValueError, match=r"\[8, 4\] and down_proj \[6, 8\]"):
        AllGatherMLP.from_full(dense)
    dense.down_proj = nn.Linear(8, 4, bias=False)
    with pytest.raises(ValueError, match="has a bias, the other none"):
        AllGatherMLP.from_full(dense)
    with pytest.raises(ValueError, match=r"input \[3, 5\], expected \[..., 4\]"):
        AllGatherMLP(4, 8)(torch.ones(3, 5))


@pytest.mark.verifies(MLP)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(world):
    world(2).run(refusals)
