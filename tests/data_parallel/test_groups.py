"""Two groups side by side: nothing of one reaches the other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    GROUPS,
    adamw,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    my_group,
    reference_of_group,
)
from xtrain.comm.collective_choice import collectives_named
from xtrain.data_parallel import (
    DistributedDataParallel,
    NaiveDataParallel,
    check_replicas,
)

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"
SIZE = sum(map(len, GROUPS))
STEPS = 3


def train(kind):
    number, group, index = my_group()
    bare = make_model(20 + number if index == 0 else 90 + dist.get_rank())
    if kind == "naive":
        model = NaiveDataParallel(bare, process_group=group)
    else:
        chosen = {} if kind == "default" else {"collectives": collectives_named(kind)}
        model = DistributedDataParallel(bare, process_group=group, **chosen)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        loss_of(model, batch_of(step, number, index)).backward()
        if kind == "naive":
            model.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    check_replicas(model, group)
    if index == 1 and number == 1:
        bare.norm.weight.data[0] += 1
    try:
        check_replicas(model, group)
        said = None
    except RuntimeError as error:
        said = str(error)
    if index == 1 and number == 1:
        bare.norm.weight.data[0] -= 1
    return number, dict(bare.state_dict()), said


@pytest.mark.verifies(
    DDP,
    "xtrain.data_parallel.naive:NaiveDataParallel",
    "xtrain.data_parallel.replicas:check_replicas",
)
@pytest.mark.parametrize("kind", ["naive", "default", "torch", "ring", "direct"])
def test_groups_train_for_themselves(world, kind):
    for number, state, said in world(SIZE).run(train, kind):
        assert largest_difference(state, reference_of_group(number, STEPS)) < 1e-12
        if number == 0:
            assert said is None
        else:
            assert "norm.weight on ranks [1]" in said


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x, use_b):
        x = x + 0 * self.norm(x)
        return self.b(x) if use_b else self.a(x)


def uneven_and_unused():
    """Group 1 only: rank 1 runs out first, others' parameters go unused here."""
    number, group, index = my_group()
    torch.manual_seed(number)
    model = DistributedDataParallel(
        Branches(), process_group=group, find_unused_parameters=True
    )
    seen = []
    with model.join():
        for _ in range(1 + (index == number)):  # rank 0 of group 0, rank 1 of group 1
            x = torch.full((4, 2), 1.0 + 10 * number)
            model(x, use_b=index == 0).sum().backward()
            grads = [model.module.a.weight.grad, model.module.b.weight.grad]
            seen.append([None if g is None else g[0, 0].item() for g in grads])
            model.zero_grad()
    return number, index, seen, model.module.norm.num_batches_tracked.item()


@pytest.mark.verifies(DDP, "xtrain.data_parallel.join:join")
def test_join_and_unused_parameters_in_groups(world):
    for number, index, seen, batches in world(SIZE).run(uneven_and_unused):
        size, value = len(GROUPS[number]), 4 * (1.0 + 10 * number)
        everyone = [value * (size - 1) / size, value / size]
        assert seen[0] == pytest.approx(everyone, rel=1e-6)
        if len(seen) > 1:
            used, other = (1, 0) if index == 0 else (0, 1)
            assert seen[1][used] == pytest.approx(value / size, rel=1e-6)
            assert seen[1][other] is None
        assert batches == 2
