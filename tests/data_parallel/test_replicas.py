"""Replicas that differ in a bit are named, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training import batch_of, loss_of, make_model
from xtrain.data_parallel import DistributedDataParallel, check_replicas
from xtrain.testing import expect_error


def after_a_step(how):
    rank = dist.get_rank()
    model = make_model(rank if how == "own seeds" else 0)
    wrapped = DistributedDataParallel(model) if how == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(wrapped, batch_of(0, 0, rank if how == "ddp" else 0)).backward()
    optimizer.step()
    last = model.layers[-1].mlp.down_proj.weight
    if how == "one bit" and rank == 2:
        last.data.view(torch.int64)[3] ^= 1
    if how == "scalar":
        model.register_parameter("gain", nn.Parameter(torch.tensor(1.0 + (rank == 1))))
    if how == "nan":
        last.data.fill_(float("nan"))
    check_replicas(wrapped)
    if how == "nothing":
        model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
        model.bfloat16()
        check_replicas(model)


@pytest.mark.verifies("xtrain.data_parallel.replicas:check_replicas")
@pytest.mark.parametrize("how", ["ddp", "nan", "nothing"])
def test_the_same_bits_are_the_same(world, how):
    world(3).run(after_a_step, how)


@pytest.mark.verifies("xtrain.data_parallel.replicas:check_replicas")
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("one bit", r"in 1 of 29 .*: layers.2.mlp.down_proj.weight on ranks \[2\]"),
        ("scalar", r"in 1 of 30.* gain on ranks \[1\].*: \[1.0, 2.0, 1.0\]"),
        ("own seeds", r"in 29 of 29 .* embed_tokens.weight on ranks \[1, 2\]"),
    ],
)
def test_other_bits_are_named_on_every_rank(world, how, match):
    expect_error(world(3), after_a_step, how, error=RuntimeError, match=match)


def other_shapes():
    check_replicas(nn.Linear(2, 2 + dist.get_rank()))


@pytest.mark.verifies("xtrain.data_parallel.replicas:check_replicas")
def test_other_models_are_refused(world):
    expect_error(world(2), other_shapes, error=ValueError, match="different models")
