"""Contestants that are wrong in one way each, and the right one beside them."""

from functools import partial

import torch
import torch.distributed as dist

from xtrain.bench import Case, Contestant, Race, Trial
from xtrain.bench.collective_trials import all_reduce_reference, trial
from xtrain.bench.races import lc1
from xtrain.comm import ring_all_reduce
from xtrain.plan import Traffic


def off_by_one_on_last_rank(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    if dist.get_rank() == dist.get_world_size() - 1:
        tensor[-1] += 1


def forgets_to_communicate(tensor: torch.Tensor) -> None:
    tensor.mul_(dist.get_world_size())


def makes_not_a_number(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    tensor[0] = float("nan")


def sends_twice(tensor: torch.Tensor) -> None:
    copy = tensor.clone()
    ring_all_reduce(tensor)
    ring_all_reduce(copy)


def wrong_shape(case: Case) -> Trial:
    tensor = torch.zeros(3)
    return Trial(partial(dist.all_reduce, tensor), [tensor])


def ring_traffic(case: Case) -> Traffic:
    return lc1.traffic("ring_all_reduce", case)


def race_against_gloo(*contestants: Contestant, **changes) -> Race:
    options = {"sizes": (400,), "reference": all_reduce_reference} | changes
    return Race("test", "A test", (lc1.GLOO, *contestants), **options)


def wrong_beside(right, wrong, size: int, **options) -> Race:
    """A race of a right and a wrong trial of the same computation."""
    sides = Contestant("one", right), Contestant("wrong", wrong)
    return Race("wrong", "Wrong", sides, sizes=(size,), **options)


def all_reduce(function, traffic=None) -> Contestant:
    return Contestant(
        function.__name__, partial(trial, "all_reduce", function), traffic
    )
