"""However a run ends, no thread is left and the process is as it was."""

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from xtrain.cluster import Deadlock, VirtualCluster, dgx_h100, running
from xtrain.testing import RankTimeout


def process() -> tuple:
    """What a run must leave as it was."""
    return (
        distributed_c10d._world, os.environ,
        {name: value for name, value in os.environ.items() if "PYTEST" not in name},
        random.random,
        random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        torch.get_num_threads(), torch.is_grad_enabled(), sys.excepthook, time.sleep,
        torch.are_deterministic_algorithms_enabled(), running.cluster(),
        signal.getsignal(signal.SIGINT), os.sched_getaffinity(0),
        [t.name for t in threading.enumerate() if t.name.startswith("xtrain rank")],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = process()
    yield
    assert process() == before
    total = torch.ones(1)

    def reduce() -> float:
        dist.all_reduce(total.clone())
        return 1.0

    assert VirtualCluster(3).run(reduce) == [1.0] * 3  # the next run works


def changes_all() -> None:
    os.environ["RANK"] = "changed"
    os.environ["OF_A_RANK"] = "1"
    torch.manual_seed(5)
    random.seed(5)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    dist.all_reduce(torch.ones(2))


def test_what_ranks_change_is_put_back() -> None:
    VirtualCluster(4).run(changes_all)


def spins() -> None:
    if dist.get_rank() == 1:
        while True:
            pass
    dist.barrier()


def spins_on() -> None:
    """Catches whatever is to end it, a hundred times."""
    for _ in range(100):
        try:
            spins()
        except BaseException:
            continue


@pytest.mark.parametrize("fn", [spins, spins_on])
@pytest.mark.verifies("xtrain.cluster.virtual_cluster:VirtualCluster")
def test_an_endless_loop_is_cut_and_its_stack_shown(fn) -> None:
    with pytest.raises(RankTimeout, match="rank 1 ran for 0.5 s") as caught:
        VirtualCluster(3, limit=0.5).run(fn)
    assert caught.value.first.rank == 1
    assert "in spins" in caught.value.first.detail
    assert "waiting in barrier" in str(caught.value)


def turns_for_ever() -> None:
    while True:
        dist.barrier()


def test_a_deadline() -> None:
    with pytest.raises(RankTimeout, match="not finished after 0.3 s"):
        VirtualCluster(3).run(turns_for_ever, timeout=0.3)


def runs_until(timer: threading.Timer, fn) -> None:
    timer.start()
    VirtualCluster(3).run(fn, timeout=60)
    time.sleep(5)  # it came before the run began


@pytest.fixture
def ctrl_c_is_heard(monkeypatch):
    """A process that pytest-xdist has started ignores it.

    A Stopped that comes while Python runs a weak reference's callback is reported and
    ignored, and comes again: pytest's report, in Python, would be interrupted by it.
    """
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("fn", [turns_for_ever, spins])
@pytest.mark.verifies("xtrain.cluster.threads:Interrupts")
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_at_any_moment(fn) -> None:
    VirtualCluster(3).run(dist.barrier)  # an interrupt can end the watch on what runs
    draw = random.Random(3)
    for _ in range(12):
        delay = draw.choice([0.0, 0.002, 0.01, 0.05, 0.2])
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            runs_until(timer, fn)


def test_from_another_thread() -> None:
    results: list = []
    thread = threading.Thread(
        target=lambda: results.extend(VirtualCluster(2).run(dist.get_rank))
    )
    thread.start()
    thread.join()
    assert results == [0, 1]


def exits() -> None:
    if dist.get_rank() == 0:
        sys.exit(3)
    dist.barrier()


def test_a_rank_that_exits() -> None:
    with pytest.raises(Exception, match="SystemExit: 3"):
        VirtualCluster(2).run(exits)


def nested() -> None:
    VirtualCluster(2).run(dist.barrier)


def in_a_thread() -> list[str]:
    errors: list[str] = []

    def reduce() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=reduce)
    thread.start()
    thread.join()
    return errors


def test_a_cluster_in_a_cluster_and_a_thread_of_a_rank() -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        VirtualCluster(2).run(nested)
    errors = VirtualCluster(2).run(in_a_thread)
    assert all("outside of its rank's thread" in error for (error,) in errors)


def test_a_group_after_the_run() -> None:
    groups = []
    VirtualCluster(1).run(lambda: groups.append(dist.group.WORLD))
    with pytest.raises(RuntimeError, match="outside of its rank's thread"):
        groups[0].allreduce([torch.ones(1)])
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="is for ranks of a virtual cluster"):
        dist.init_process_group("xtrain-virtual", store=store, rank=0, world_size=1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_sizes_that_are_none(size) -> None:
    with pytest.raises(ValueError, match=f"size={size}"):
        VirtualCluster(size)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="joins 8 ranks, the cluster has 9"):
        VirtualCluster(9, dgx_h100(1))
    with pytest.raises(ValueError, match="copy of the arguments"):
        VirtualCluster(2).run(print, threading.Lock())
    with pytest.raises(TypeError, match="missing 1 required"):
        VirtualCluster(2).run(lambda x: x)


def test_rank_and_size_are_given_to_a_function_that_takes_them() -> None:
    assert VirtualCluster(2).run(lambda rank, size, x: (rank, size, x), 5) == [
        (0, 2, 5), (1, 2, 5),
    ]  # fmt: skip
    assert VirtualCluster(2).run(lambda x: x, 5) == [5, 5]


def test_a_deadlock_leaves_nothing() -> None:
    with pytest.raises(Deadlock):
        VirtualCluster(3).run(lambda rank, size: dist.recv(torch.ones(1), 1 - rank % 2))


def asked_in_a_thread(question) -> list:
    answers = []

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError as error:
            answers.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers


def asks_in_threads() -> list:
    """Deadlines around a store are threads: what they ask is answered in their rank."""
    rank, store = dist.get_rank(), running.cluster().store
    found = []
    for turn in range(20):
        found += asked_in_a_thread(lambda turn=turn: store.check([f"{turn}"]))
        asked_in_a_thread(lambda turn=turn: store.set(f"{turn} of {rank}", "here"))
        found += asked_in_a_thread(lambda turn=turn: store.get(f"{turn} of {rank}"))
        total = torch.ones(1)
        dist.all_reduce(total)
        found.append(total.item())
    return [*found, *asked_in_a_thread(lambda: store.get("never"))]


@pytest.mark.verifies("xtrain.cluster.scheduler:Scheduler")
def test_a_thread_of_a_rank_asks_the_store() -> None:
    for rank, found in enumerate(VirtualCluster(5).run(asks_in_threads)):
        assert found[:-1] == [False, b"here", 5.0] * 20
        assert f"a thread that rank {rank} has started waits" in found[-1]


def fails_while_ranks(act) -> None:
    """An event of the cluster raises while most ranks wait."""

    def fail() -> None:
        raise ArithmeticError("a defect of an event")

    if dist.get_rank() == 1:
        running.cluster().scheduler.at(0.0, fail)
        act()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("act", [lambda: None, sys.exit, lambda: time.sleep(0.1)])
@pytest.mark.verifies("xtrain.cluster.scheduler:Scheduler")
def test_an_event_that_fails_ends_all_ranks(act) -> None:
    with pytest.raises(ArithmeticError, match="a defect of an event"):
        VirtualCluster(4).run(fails_while_ranks, act, timeout=60)
