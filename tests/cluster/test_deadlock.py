"""Deadlocks are named at once, and so are calls that do not fit together."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import Deadlock, MismatchedCollectives, PeerEnded, VirtualCluster
from xtrain.testing import RankError

DEADLOCK = "xtrain.cluster.deadlock:what_is_wrong"


def receives_around() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.zeros(3), (rank + 1) % size)


def sends_around() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.zeros(3), (rank + 1) % size)


def two_groups() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[dist.get_rank()]
    for number in order:
        dist.all_reduce(torch.ones(2), group=groups[number])


def a_key_too_late() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.get("ready")
        dist.send(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
        store.set("ready", "yes")


@pytest.mark.parametrize(
    ("fn", "size", "words"),
    [
        (receives_around, 4, "rank 2: recv([3] float32, src=3)"),
        (sends_around, 3, "rank 2: send([3] float32, dst=0)"),
        (two_groups, 3, "rank 1: all_reduce([2] float32, SUM) in group 1, 2"),
        (a_key_too_late, 2, "key"),
    ],
)
@pytest.mark.verifies(DEADLOCK, "xtrain.cluster.deadlock:Deadlock")
def test_the_circle_is_named(fn, size, words) -> None:
    with pytest.raises(Deadlock) as caught:
        VirtualCluster(size).run(fn)
    assert sorted(caught.value.cycle) == list(range(size))
    assert words in str(caught.value)
    assert "test_deadlock.py:" in str(caught.value)


def test_a_thousand_ranks() -> None:
    with pytest.raises(Deadlock) as caught:
        VirtualCluster(1024, checks=False).run(receives_around)
    assert sorted(caught.value.cycle) == list(range(1024))
    assert len(str(caught.value)) < 300_000


def returns_early() -> None:
    if dist.get_rank() > 0:
        dist.all_reduce(torch.ones(1))


def polls_for_ever() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.zeros(1), 1)
        while not work.is_completed():
            pass
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)


def test_without_a_circle_those_that_wait_are_named() -> None:
    with pytest.raises(Deadlock, match="rank 0 has returned") as caught:
        VirtualCluster(3).run(returns_early)
    assert caught.value.cycle == [1, 2]


def test_a_loop_that_asks_in_vain_ends() -> None:
    with pytest.raises(Deadlock, match="rank 1"):
        VirtualCluster(2, limit=30).run(polls_for_ever)


def goes_on() -> float:
    with contextlib.suppress(Deadlock):
        receives_around()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_program_may_go_on_after_a_deadlock() -> None:
    assert VirtualCluster(3).run(goes_on) == [3.0] * 3


def sets_what_was_given_up() -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(Deadlock):
        store.get("late")
    store.set("late", "yes")  # wakes those that wait for it, and no other
    sums = []
    for _ in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
    return sums


@pytest.mark.verifies("xtrain.cluster.store:VirtualStore")
def test_a_key_that_was_given_up_wakes_no_rank() -> None:
    for seed in (None, 1, 2, 3):
        found = VirtualCluster(4, seed=seed).run(sets_what_was_given_up, timeout=60)
        assert found == [[4.0] * 3] * 4


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise LookupError("no such file")
    dist.all_reduce(torch.ones(1))


@pytest.mark.verifies("xtrain.cluster.deadlock:PeerEnded")
def test_a_rank_that_raises_ends_the_others_with_its_error_first() -> None:
    with pytest.raises(LookupError, match="no such file") as caught:
        VirtualCluster(3).run(one_raises)
    assert isinstance(caught.value, RankError)
    assert caught.value.first.rank == 1
    others = [report.exception for report in caught.value.reports if report.rank != 1]
    assert all(isinstance(error, PeerEnded) for error in others)
    assert "rank 1 has raised LookupError" in str(others[0])


def reduces(tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
    dist.all_reduce(tensor, op)


def mismatched(what: str) -> None:
    odd, x = dist.get_rank() == 1, torch.ones(4)
    if what == "shape":
        dist.all_reduce(torch.ones(5) if odd else x)
    elif what == "dtype":
        dist.all_reduce(x.double() if odd else x)
    elif what == "op":
        dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif what == "root":
        dist.broadcast(x, 1 if odd else 0)
    elif what == "kind":
        dist.barrier() if odd else dist.all_reduce(x)
    else:
        splits = [3, 1] if odd else [2, 2]
        dist.all_to_all_single(torch.empty(4), x, [2, 2], splits)


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "kind", "splits"])
@pytest.mark.verifies("xtrain.cluster.collectives:MismatchedCollectives")
def test_different_calls_raise_on_all_ranks(what) -> None:
    with pytest.raises(MismatchedCollectives) as caught:
        VirtualCluster(2).run(mismatched, what)
    kinds = {type(report.exception) for report in caught.value.reports}
    assert kinds == {MismatchedCollectives}
    assert "rank 0: " in str(caught.value)
    assert "rank 1: " in str(caught.value)
    assert "test_deadlock.py:" in str(caught.value)


def sizes_differ() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4), 1)
    else:
        dist.recv(torch.zeros(5), 0)


def test_the_two_ends_of_a_message_differ() -> None:
    with pytest.raises(RuntimeError, match=r"\[5\] float32, src=0.*\[4\] float32"):
        VirtualCluster(2).run(sizes_differ)


def asks_while_the_other_computes() -> float:
    taken = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.irecv(taken, 1)
        while not work.is_completed():
            time.sleep(0.001)
    else:
        for _ in range(500):
            time.sleep(0.01)
        dist.send(torch.ones(1), 0)
    return taken.item()


def asks_and_sleeps_for_ever() -> None:
    work = dist.irecv(torch.zeros(1), 1 - dist.get_rank())
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


def test_loops_that_ask_and_sleep() -> None:
    cluster = VirtualCluster(2)
    assert cluster.run(asks_while_the_other_computes) == [1.0, 0.0]
    assert cluster.seconds == pytest.approx([5.0, 5.0], abs=0.002)
    with pytest.raises(Deadlock) as caught:
        cluster.run(asks_and_sleeps_for_ever)
    assert sorted(caught.value.cycle) == [0, 1]
