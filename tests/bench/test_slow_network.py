"""A network with a delay: right rows, and how long a wait has to sleep."""

import time

import pytest
import torch
import torch.distributed as dist

from xtrain.bench.slow_network import slow_network

SLOW = "xtrain.bench.slow_network:SlowNetwork"


def rows_and_pauses() -> tuple[list[int], list[int], list[float], list[bool]]:
    """Uneven rows to every rank; what a sleep of each wait was asked for."""
    pauses: list[float] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    group = slow_network(50.0, 100.0, sleep=pauses.append)
    sends = [rank + to for to in range(size)]
    receives = [rank + source for source in range(size)]
    rows = torch.tensor([float(10 * rank + to) for to in range(size)])
    x = rows.repeat_interleave(torch.tensor(sends))[:, None].expand(-1, 2_500)
    y = torch.empty(sum(receives), 2_500)
    first = dist.all_to_all_single(
        y, x.contiguous(), receives, sends, group, async_op=True
    )
    second = dist.all_to_all_single(
        torch.empty(size), torch.ones(size), group=group, async_op=True
    )
    dist.barrier()  # the rows may be there, but are not to be seen
    done = [first.is_completed()]
    first.wait()
    second.wait()
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group)
    late = 100.0 * sum(n for to, n in enumerate(sends) if to != rank)
    wanted = [50.0 + late, 100.0 + late]
    found = y[:, 0].long().tolist()
    dist.destroy_process_group(group)
    expected = [10 * s + rank for s in range(size) for _ in range(rank + s)]
    near = [abs(p - w) < 10 for p, w in zip(pauses, wanted, strict=True)]
    return found, expected, pauses, [*near, not any(done)]


@pytest.mark.verifies(SLOW)
@pytest.mark.verifies("xtrain.bench.slow_network:slow_network")
@pytest.mark.verifies("xtrain.bench.slow_network:Delayed")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_arrive_after_latency_and_size_one_call_after_the_other(world, ranks):
    for found, expected, pauses, near in world(ranks).run(rows_and_pauses):
        assert found == expected
        assert all(near), pauses


def computed_meanwhile() -> list[int]:
    """How often a wait sleeps: at once, and after longer than the message takes."""
    slept = []
    for latency in (50.0, 0.001):
        pauses: list[float] = []
        group = slow_network(latency, sleep=pauses.append)
        x = torch.ones(group.size())
        y = torch.empty_like(x)
        work = dist.all_to_all_single(y, x, group=group, async_op=True)
        while latency < 1 and time.perf_counter() < group.calls[-1][1]:
            y = y + 1  # it computes
        work.wait()
        slept.append(len(pauses))
        dist.destroy_process_group(group)
    return slept


@pytest.mark.verifies("xtrain.bench.slow_network:Delayed")
def test_what_was_computed_meanwhile_is_not_slept(world):
    assert world(2).run(computed_meanwhile) == [[1, 0], [1, 0]]


def refused() -> None:
    slow_network(-1.0)


def test_a_network_without_time_is_refused(world):
    with pytest.raises(Exception, match="a network takes time"):
        world(2).run(refused)
