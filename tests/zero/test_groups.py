"""Two groups side by side: nothing of one reaches the other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import (
    GROUPS,
    batch_of,
    largest_difference,
    loss_of,
    make_model,
    my_group,
    reference_of_group,
)
from xtrain.checkpoint import CheckpointError
from xtrain.comm.collective_choice import collectives_named
from xtrain.zero import (
    AdamW,
    FullyShardedDataParallel,
    LossScaler,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
)

ZERO = "xtrain.zero.optimizer:ZeroOptimizer"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
SIZE = sum(map(len, GROUPS))
STEPS = 3


class Run:
    """A model and its optimizer in this rank's group."""

    def __init__(self, stage, group, seed, choice):
        bare = make_model(seed)
        common = {"process_group": group, "collectives": choice}
        options = {"lr": 0.02, "weight_decay": 0.1}
        if stage == 3:
            self.model = FullyShardedDataParallel(bare, **common)
            self.optimizer = AdamW(self.model.parameters(), **options)
            self.clip = self.model.clip_grad_norm_
            self.save = lambda d, step: self.model.save_sharded(d, step, self.optimizer)
            self.load = lambda d: self.model.load_sharded(d, self.optimizer)
            self.weights = self.model.full_state_dict
        else:
            self.model = bare
            self.optimizer = ZeroOptimizer(
                bare.parameters(), AdamW, stage, **common, **options
            )
            self.clip = self.optimizer.clip_grad_norm_
            self.save = lambda d, step: self.optimizer.save_sharded(d, step, bare)
            self.load = lambda d: self.optimizer.load_sharded(d, bare)
            self.weights = lambda: dict(bare.state_dict())

    def step(self, batch):
        loss_of(self.model, batch).backward()
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(stage, choice, directory):
    number, group, index = my_group()
    choice = None if choice == "default" else collectives_named(choice)
    run = Run(stage, group, 20 + number if index == 0 else 90 + index, choice)
    if stage < 3:  # buffers are the caller's
        run.model.scale.copy_(make_model(20 + number).scale)
    for step in range(2):
        run.step(batch_of(step, number, index))
    path = run.save(f"{directory}/{number}", 2 + number)
    assert path.name == f"step-0000000{2 + number}"
    dist.barrier(group)
    other = Run(stage, group, 70 + dist.get_rank(), choice)
    assert other.load(f"{directory}/{number}") == (2 + number, None)
    other.step(batch_of(2, number, index))
    state = {name: tensor.clone() for name, tensor in other.weights().items()}
    # What one group is refused is nothing to the other.
    said = None
    try:
        other.load(f"{directory}/{number if number == 0 else 'nowhere'}")
    except CheckpointError as error:
        said = str(error)
    return number, state, said


@pytest.mark.verifies("xtrain.checkpoint.training_state:load_state", ZERO, FSDP)
@pytest.mark.parametrize(
    ("stage", "choice"),
    [
        *[(1, "torch"), (2, "ring"), (3, "torch"), (3, "ring")],
        *[(stage, "default") for stage in (1, 2, 3)],
    ],
)
def test_groups_train_save_and_load_for_themselves(world, tmp_path, stage, choice):
    for number, state, said in world(SIZE).run(train, stage, choice, str(tmp_path)):
        expected = reference_of_group(number, STEPS, max_norm=1.0)
        assert largest_difference(state, expected) < 1e-12
        assert (said is None) == (number == 0)
        if said:
            assert "nowhere is not a checkpoint" in said


def overflow_in_group_1():
    number, group, index = my_group()
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    scaler = LossScaler(init_scale=8.0, process_group=group)
    optimizer = MixedPrecisionOptimizer([parameter], AdamW, scaler, lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    if (number, index) == (1, 2):
        parameter.grad[1] = float("inf")
    return number, optimizer.step(), scaler.scale


@pytest.mark.verifies("xtrain.zero.mixed_precision:LossScaler")
def test_an_overflow_stays_in_its_group(world):
    for number, stepped, scale in world(SIZE).run(overflow_in_group_1):
        assert (stepped, scale) == ((True, 8.0) if number == 0 else (False, 4.0))


def different_models_in_group_1():
    number, group, index = my_group()
    wide = number == 1 and index == 2
    try:
        FullyShardedDataParallel(nn.Linear(2, 2 + wide), process_group=group)
        ZeroOptimizer(nn.Linear(2, 2 + wide).parameters(), AdamW, process_group=group)
    except ValueError as error:
        return number, str(error)
    return number, None


@pytest.mark.verifies(ZERO, FSDP)
def test_different_models_are_told_where_they_are(world):
    for number, said in world(SIZE).run(different_models_in_group_1):
        if number == 0:
            assert said is None
        else:
            assert "ranks 1 and 4 have different parameters" in said
