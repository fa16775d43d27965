"""Observers of calls: several at once, what they see, and that no method stays so."""

import time

import pytest
import torch
import torch.distributed as dist

from xtrain.comm.call_observer import CallObserver
from xtrain.comm.waiting_time import WaitingTime


class Seen(CallObserver):
    def __init__(self):
        self.calls, self.errors, self.works = [], 0, set()

    def observe(self, op, group, args):
        self.calls.append(op)
        return len(self.calls)

    def returned(self, kept, work):
        assert kept == len(self.calls)
        self.works.add(type(work))

    def failed(self, kept, error):
        self.errors += 1


def methods(works):
    classes = [dist.ProcessGroup, type(dist.group.WORLD), *works]
    return [dict(vars(one)) for cls in classes for one in cls.__mro__[:-1]]


def observed():
    """What two observers saw, of which the first one leaves first."""
    works = {type(dist.all_reduce(torch.ones(2), async_op=True))}
    before = methods(works)
    dist.barrier()
    first, second, waiting = Seen(), Seen(), WaitingTime()
    with waiting:
        first.__enter__()
        dist.all_reduce(torch.ones(2))
        second.__enter__()
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.group.WORLD.allreduce("no tensor")
        first.__exit__()
        dist.broadcast(torch.ones(2), 0)
        second.__exit__()
    dist.barrier()  # ranks may be threads: the last one unwraps
    assert methods(works) == before and waiting.seconds > 0
    return first.calls, first.errors, second.calls, second.errors


@pytest.mark.world_sizes(2, 3)
@pytest.mark.verifies("xtrain.comm.call_observer:CallObserver")
def test_each_observer_sees_the_calls_while_it_is_entered(world, world_size):
    reduced = ["all_reduce"] * 3
    expected = reduced, 1, [*reduced[:2], "broadcast"], 1
    assert world(world_size).run(observed) == [expected] * world_size


NAP = 0.2


def late(rank_late):
    """Seconds that this rank counts in a call, in two waits of a work, and alone."""
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: [
            work.wait() for work in [dist.all_reduce(torch.ones(2), async_op=True)] * 2
        ],
        lambda: None,
    ):
        dist.barrier()
        with WaitingTime() as waiting:
            time.sleep(NAP if dist.get_rank() == rank_late else 0.0)
            call()
        found.append(waiting.seconds)
    return found


@pytest.mark.processes("the clock is this machine's")
@pytest.mark.verifies("xtrain.comm.waiting_time:WaitingTime")
def test_a_rank_that_waits_counts_it_once_and_the_late_one_does_not(world):
    if world(2).backend == "nccl-rules":
        pytest.skip("the host does not wait for NCCL")
    waits, late_one = world(2).run(late, 1)
    assert all(0.8 * NAP < seconds < 1.9 * NAP for seconds in waits[:2])
    assert waits[2] == 0 and max(late_one) < 0.5 * NAP


@pytest.mark.verifies("xtrain.comm.waiting_time:WaitingTime")
def test_a_wait_inside_another_counts_once():
    ticks = iter(range(4))
    waiting = WaitingTime(lambda: next(ticks))
    waiting.waiting(lambda: waiting.waiting(lambda: None))
    assert waiting.seconds == 1
