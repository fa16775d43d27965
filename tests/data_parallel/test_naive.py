"""Parameters of which some ranks use others: the ranks' calls stay in pairs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import NaiveDataParallel
from xtrain.whiteboard.data_parallel import (
    distributed_data_parallel,
    naive_data_parallel,
)


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(2))
        self.frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)

    def forward(self, x, road):
        return getattr(self, road)(x) + self.frozen(x)


def one_parameter_a_bucket(module):
    return distributed_data_parallel.DistributedDataParallel(module, bucket_cap_mb=1e-6)


def other_roads(wrap):
    """Each rank uses another branch; the second step is one after the first."""
    rank = dist.get_rank()
    model = wrap(TwoRoads())
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([10.0**rank]), ("left", "right")[rank % 2]).sum().backward()
        if hasattr(model, "reduce_gradients"):
            model.reduce_gradients()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(
    "xtrain.data_parallel.naive:NaiveDataParallel",
    "xtrain.whiteboard.data_parallel.naive_data_parallel:NaiveDataParallel",
)
@pytest.mark.parametrize(
    "wrap",
    [
        NaiveDataParallel,
        naive_data_parallel.NaiveDataParallel,
        one_parameter_a_bucket,
    ],
)
def test_unused_parameters_count_as_zero(world, wrap, size):
    for left, right, frozen in world(size).run(other_roads, wrap):
        assert left.item() == pytest.approx({2: 1, 3: 101}[size] / size)
        assert right.item() == pytest.approx(10 / size)
        assert frozen is None
