"""Ranks that stand for others: rings of messages, memory by what it is for, numbers."""

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, dgx_h100, now, running
from xtrain.comm import ring_all_reduce

MAILBOX = "xtrain.cluster.messages:Mailbox"
DEVICE = "xtrain.cluster.compute:Device"


def ring() -> float:
    ring_all_reduce(torch.zeros(3 * 2**24, device="meta"))
    return now()


@pytest.mark.verifies(MAILBOX)
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_one_rank_of_a_ring_takes_as_long_as_all(size):
    """Over two nodes its messages take the slower links, as the last ones to end."""
    nodes = dgx_h100(-(-size // 8))
    every = VirtualCluster(size, nodes).run(ring)
    one = VirtualCluster(size, nodes, alike=lambda rank: 0).run(ring)
    assert max(one) == pytest.approx(max(every), rel=1e-9 if size <= 8 else 1e-2)


def to_another_class() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 3)


@pytest.mark.verifies(MAILBOX)
def test_a_rank_of_another_class_that_does_not_run_is_refused():
    cluster = VirtualCluster(4, alike=[0, 0, 2, 2])
    with pytest.raises(ValueError, match="rank 3 does not run, rank 2 runs"):
        cluster.run(to_another_class)


def phases() -> tuple[dict[str, int], dict[str, int]]:
    device = running.cluster()._device()
    device.phase = "weights"
    weights = torch.empty(100, device="meta")
    device.phase = "work"
    kept = torch.zeros(20, device="meta")
    other = torch.zeros(60, device="meta")
    del other
    device.rename("work", "gradients")
    most = dict(device.at_peak)
    device.forget_peak()
    device.name(weights, "moved")
    del kept
    return most, dict(device.at_peak)


@pytest.mark.verifies(DEVICE)
def test_memory_is_told_apart_by_what_it_is_for():
    cluster = VirtualCluster(1, accelerator="h100")
    ((most, after),) = cluster.run(phases)
    assert most == {"weights": 400, "work": 240, "gradients": 80}
    assert after == {"weights": 0, "moved": 400, "work": 0, "gradients": 80}


def asks() -> tuple[object, ...]:
    row = torch.ones(3, 2, device="meta").index_select(0, torch.tensor([0, 2]))
    counts = row[0].long().bincount(minlength=3)
    return row.sum().item(), tuple(row.shape), row.tolist(), counts.byte().tolist()


@pytest.mark.verifies(DEVICE)
def test_numbers_on_meta_are_zero_and_places_may_have_data():
    ((*found,),) = VirtualCluster(1, accelerator="h100").run(asks)
    assert found == [0, (2, 2), [[0.0, 0.0]] * 2, [0, 0, 0]]
