"""The samplers deal the indices that torch's deals."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from xtrain import data_parallel
from xtrain.whiteboard.data_parallel import distributed_sampler

LIBRARY = "xtrain.data_parallel.sampler:DistributedSampler"
FORM = "xtrain.whiteboard.data_parallel.distributed_sampler:DistributedSampler"
LENGTHS = (0, 1, 2, 3, 5, 8, 13, 100, 101)


@pytest.mark.filterwarnings("ignore:a second pass")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(
            data_parallel.DistributedSampler, marks=pytest.mark.verifies(LIBRARY)
        ),
        pytest.param(
            distributed_sampler.DistributedSampler, marks=pytest.mark.verifies(FORM)
        ),
    ],
)
def test_indices_equal_torchs(sampler, size):
    for length, shuffle, drop_last, seed in itertools.product(
        LENGTHS, (False, True), (False, True), (0, 7)
    ):
        for rank in range(size):
            options = (range(length), size, rank, shuffle, seed, drop_last)
            ours = sampler(*options)
            if length == 0:
                assert list(ours) == []
                continue
            theirs = DistributedSampler(*options)
            for epoch in (0, 1, 5):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs), (options, epoch)
                assert len(ours) == len(theirs) == len(list(ours)), (options, epoch)


@pytest.mark.verifies(LIBRARY)
def test_an_epoch_covers_everything_once_but_for_the_padding():
    samplers = [
        data_parallel.DistributedSampler(range(10), num_replicas=4, rank=r)
        for r in range(4)
    ]
    dealt = [index for sampler in samplers for index in sampler]
    assert set(dealt) == set(range(10))
    assert len(dealt) == 12


@pytest.mark.verifies(LIBRARY)
def test_epochs_differ_only_with_set_epoch():
    sampler = data_parallel.DistributedSampler(range(50), num_replicas=2, rank=0)
    first = list(sampler)
    with pytest.warns(UserWarning, match="a second pass over epoch 0.*set_epoch"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = data_parallel.DistributedSampler(range(50), num_replicas=2, rank=0)
        orders = []
        for epoch in (0, 1, 2):
            fresh.set_epoch(epoch)
            orders.append(list(fresh))
        assert orders[0] == first
        assert orders[1] not in (orders[0], orders[2])
        in_order = data_parallel.DistributedSampler(range(9), 2, 0, shuffle=False)
        assert list(in_order) == list(in_order)  # as it should be


def test_it_drives_a_data_loader():
    data = torch.arange(10)
    sampler = data_parallel.DistributedSampler(
        data, num_replicas=2, rank=1, shuffle=False
    )
    loaded = torch.cat(list(DataLoader(data, batch_size=2, sampler=sampler)))
    assert loaded.tolist() == [1, 3, 5, 7, 9]


def test_a_rank_outside_the_replicas_is_refused():
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        data_parallel.DistributedSampler(range(4), num_replicas=2, rank=2)


@pytest.mark.verifies(LIBRARY)
def test_the_default_device_changes_nothing():
    here = list(data_parallel.DistributedSampler(range(9), 2, 1))
    with torch.device("meta"):
        assert list(data_parallel.DistributedSampler(range(9), 2, 1)) == here


def from_the_group():
    sampler = data_parallel.DistributedSampler(range(6), shuffle=False)
    assert sampler.num_replicas == dist.get_world_size()
    return list(sampler)


@pytest.mark.verifies(LIBRARY)
def test_rank_and_size_come_from_the_group_unless_given(world):
    assert world(3).run(from_the_group) == [[0, 3], [1, 4], [2, 5]]
