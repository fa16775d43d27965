"""The naive form keeps the ranks' calls in pairs, whatever took part where."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import NaiveDataParallel


class TwoRoads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(1, 1, bias=False) for _ in range(2))
        self.frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)

    def forward(self, x, road):
        return getattr(self, road)(x) + self.frozen(x)


def other_roads():
    rank = dist.get_rank()
    model = NaiveDataParallel(TwoRoads())
    model(torch.tensor([10.0**rank]), ("left", "right")[rank % 2]).sum().backward()
    model.reduce_gradients()
    return [p.grad for p in model.parameters()]


@pytest.mark.verifies("xtrain.data_parallel.naive:NaiveDataParallel")
def test_unused_parameters_count_as_zero(world):
    for left, right, frozen in world(2).run(other_roads):
        assert (left.item(), right.item(), frozen) == (0.5, 5, None)
    for left, right, frozen in world(3).run(other_roads):
        assert left.item() == pytest.approx(101 / 3)
        assert right.item() == pytest.approx(10 / 3)
        assert frozen is None
