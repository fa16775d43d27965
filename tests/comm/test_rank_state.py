"""What belongs to a rank is kept for each thread: ranks may be threads of a process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, debug_checks
from xtrain.comm.call_agreement import is_counted, uncounted
from xtrain.comm.debug_checks import comparing
from xtrain.comm.deferred import DeferredGradients, active_queue
from xtrain.comm.uneven import has_uneven_calls, uneven_calls


def state() -> tuple[bool, ...]:
    queue = active_queue() is not None
    return not is_counted(), comparing(), has_uneven_calls(None), queue


def with_all_on(one, meet) -> tuple[tuple[bool, ...], int]:
    """Switch everything on, then count the calls while the other thread makes one."""
    with CommLedger() as ledger:
        with debug_checks(), uneven_calls(None), uncounted(), DeferredGradients():
            meet()
            found = state()
            meet()
        dist.all_reduce(one)
        meet()
        meet()
    return found, len(ledger.events)


def with_all_off(one, meet) -> tuple[tuple[bool, ...], int]:
    meet()
    found = state()
    meet()
    meet()
    dist.all_reduce(one)
    meet()
    return found, 0


def as_threads() -> list[tuple[tuple[bool, ...], int]]:
    meet = partial(threading.Barrier(2).wait, 20)
    one = torch.ones(1)  # the default device is this thread's
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(body, one, meet) for body in (with_all_on, with_all_off)
        ]
        return [rank.result() for rank in ranks]


@pytest.mark.verifies(
    "xtrain.comm.call_agreement:uncounted", "xtrain.comm.uneven:uneven_calls"
)
@pytest.mark.processes("its own threads are the ranks")
def test_switches_of_one_thread_are_off_in_another(world):
    (results,) = world(1).run(as_threads)
    assert results == [((True,) * 4, 1), ((False,) * 4, 0)]
