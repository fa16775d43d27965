"""The order of ranks: the same every time, another legal one for every seed."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, advance, flat, now, nvlink
from xtrain.comm import all_to_all_single, ring_all_reduce

RING = ("xtrain.cluster.virtual_cluster:VirtualCluster",)


def skewed_ring(events: list) -> list[float]:
    """A ring on ranks that compute for different times; notes who ran when."""
    rank = dist.get_rank()
    tensor = torch.arange(7.0) + rank
    for step in range(3):
        advance(1e-3 * ((rank * 7 + step * 3) % 5))
        events.append((rank, step, now()))
        ring_all_reduce(tensor)
        events.append((rank, step, now()))
    return tensor.tolist()


def run_of(fn, size: int, **options) -> tuple[list, list, list[float]]:
    events: list = []
    cluster = VirtualCluster(size, flat(2e-6, 1e9), **options)
    results = cluster.run(lambda: fn(events))
    return results, events, cluster.seconds


@pytest.mark.verifies("xtrain.cluster.scheduler:Scheduler", *RING)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_same_program_gives_the_same_order(size) -> None:
    first, again = run_of(skewed_ring, size), run_of(skewed_ring, size)
    assert first == again
    VirtualCluster(3).run(dist.barrier)  # another run between changes nothing
    assert run_of(skewed_ring, size) == first


def all_at_once() -> None:
    size = dist.get_world_size()
    given, taken = torch.ones(size, 1000), torch.empty(size, 1000)
    all_to_all_single(taken, given)


def test_the_same_order_on_links_that_are_shared() -> None:
    orders, kept = [], []
    for run in range(4):
        kept.append([object() for _ in range(1000 * run)])  # other places in memory
        cluster = VirtualCluster(8, nvlink(8), record=True)
        cluster.run(all_at_once)
        assert cluster.record is not None
        orders.append(list(cluster.record.transfers))
    assert all(order == orders[0] for order in orders)


def test_seeds_draw_other_orders_with_the_same_results_and_times() -> None:
    results, _, seconds = run_of(skewed_ring, 4)
    orders = set()
    for seed in range(200):
        drawn, order, clocks = run_of(skewed_ring, 4, seed=seed)
        assert drawn == results
        assert clocks == pytest.approx(seconds, rel=1e-12)
        orders.add(tuple(order))
    assert len(orders) > 100
    assert run_of(skewed_ring, 4, seed=7) == run_of(skewed_ring, 4, seed=7)


def reads_too_early() -> float:
    """Rank 1 uses what it receives without waiting for it."""
    tensor = torch.full((4,), 1.0 + dist.get_rank())
    if dist.get_rank() == 0:
        dist.isend(tensor, 1).wait()
        return 0.0
    work = dist.irecv(tensor, 0)
    dist.barrier(group=dist.new_group([1], use_local_synchronization=True))
    seen = tensor.sum().item()
    work.wait()
    return seen


def writes_too_early() -> float:
    """Rank 0 changes what it sends without waiting for it."""
    tensor = torch.full((4,), 1.0)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        dist.barrier(group=dist.new_group([0], use_local_synchronization=True))
        tensor.zero_()
        work.wait()
        return 0.0
    dist.irecv(tensor, 0).wait()
    return tensor.sum().item()


@pytest.mark.parametrize("fn", [reads_too_early, writes_too_early])
def test_some_seed_shows_a_race(fn) -> None:
    seen = {VirtualCluster(2, seed=seed, checks=False).run(fn)[1] for seed in range(64)}
    assert len(seen) > 1


def first_of_any() -> int:
    if dist.get_rank() == 0:
        tensor = torch.zeros(1)
        sources = [dist.recv(tensor) for _ in range(dist.get_world_size() - 1)]
        return sources[0]
    advance(1e-3 * (4 - dist.get_rank()))
    dist.send(torch.zeros(1), 0)
    return 0


def test_a_receive_from_any_source_takes_the_earliest_and_with_a_seed_any() -> None:
    assert VirtualCluster(4, flat(0.0, 1e9)).run(first_of_any)[0] == 3
    drawn = {VirtualCluster(4, seed=seed).run(first_of_any)[0] for seed in range(40)}
    assert drawn == {1, 2, 3}


def sleeps() -> float:
    time.sleep(3600.0 * dist.get_rank())
    dist.barrier()
    return now()


@pytest.mark.verifies("xtrain.cluster.clock:now", "xtrain.cluster.clock:advance")
def test_sleeping_is_virtual() -> None:
    assert VirtualCluster(3).run(sleeps) == [7200.0] * 3
    with pytest.raises(ValueError, match="-1"):
        advance(-1)
    assert advance(1.0) is None
    assert now() == 0.0


def polls() -> float:
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        advance(2.0)
        dist.send(tensor, 1)
        return now()
    work = dist.irecv(tensor, 0)
    while not work.is_completed():
        pass
    return now()


def test_a_loop_that_asks_ends_when_the_message_is_there() -> None:
    sent, seen = VirtualCluster(2, flat(0.5, 1e9)).run(polls)
    assert sent == pytest.approx(2.5)
    assert seen == pytest.approx(2.5, abs=1e-3)


def test_draws_of_python_are_per_rank_and_repeat() -> None:
    def draw() -> list[float]:
        first = random.random()
        dist.barrier()
        return [first, random.random()]

    first = VirtualCluster(3).run(draw)
    assert first == VirtualCluster(3).run(draw)
    assert len({value for pair in first for value in pair}) == 6
