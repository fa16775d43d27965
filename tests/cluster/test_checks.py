"""Mistakes that are found in every run: changed buffers, works left, messages left."""

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import InFlightError, UnfinishedWork, VirtualCluster


def exchange(change: str) -> None:
    rank, tensor, into = dist.get_rank(), torch.ones(4), torch.zeros(4)
    works = [dist.irecv(into, 1 - rank), dist.isend(tensor, 1 - rank)]
    if change == "sent":
        tensor.add_(1)
    elif change == "received":
        into.add_(1)
    for work in works:
        work.wait()


def reduce(change: str) -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    if change == "reduced":
        tensor.mul_(2)
    work.wait()


def gather(change: str) -> None:
    own, whole = torch.ones(4), torch.zeros(8)
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    if change == "given":
        own.mul_(2)
    elif change == "taken":
        whole.mul_(2).add_(1)
    work.wait()


@pytest.mark.parametrize(
    ("fn", "change", "words"),
    [
        (exchange, "sent", "send.*input was changed"),
        (exchange, "received", "recv.*output was changed"),
        (reduce, "reduced", "all_reduce.* was changed"),
        (gather, "given", "all_gather.*input was changed"),
        (gather, "taken", "all_gather.*output was changed"),
    ],
)
@pytest.mark.verifies(
    "xtrain.cluster.checks:InFlight", "xtrain.cluster.checks:InFlightError"
)
def test_a_buffer_that_changes_in_flight(fn, change, words) -> None:
    with pytest.raises(InFlightError, match=words) as caught:
        VirtualCluster(2).run(fn, change)
    assert "test_checks.py:" in str(caught.value)
    VirtualCluster(2, checks=False).run(fn, change)
    VirtualCluster(2).run(fn, "nothing")


def neighbours() -> None:
    """Chunks of one tensor: one is sent while the other is written."""
    rank, chunks = dist.get_rank(), torch.ones(8).chunk(2)
    for step in range(4):
        works = [dist.irecv(chunks[1], 1 - rank), dist.isend(chunks[0], 1 - rank)]
        for work in works:
            work.wait()
        chunks[0].add_(chunks[1])
        chunks[1].mul_(step)
    empty = torch.empty(0)
    dist.all_reduce(empty)
    strided = torch.ones(4, 4).t()[::2]
    dist.all_reduce(strided)
    work = dist.all_reduce(chunks[0], async_op=True)
    chunks[1].zero_()
    work.wait()


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_no_false_alarm(seed) -> None:
    VirtualCluster(2, seed=seed).run(neighbours)


def forgets(what: str) -> None:
    rank, tensor = dist.get_rank(), torch.ones(2)
    if what == "work":
        if rank == 0:
            dist.isend(tensor, 1)
        else:
            dist.recv(tensor, 0)
    elif what == "collective":
        dist.all_reduce(tensor, async_op=True)
    elif rank == 0:
        work = dist.isend(tensor, 1)
        work.is_completed()
        work.waited = True  # the message alone is to be found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("work", r"never waited for:\n  send\(\[2\] float32, dst=1\)"),
        ("collective", r"never waited for:\n  all_reduce"),
        ("message", r"without their other end:\n  rank 0: send"),
    ],
)
@pytest.mark.verifies(
    "xtrain.cluster.checks:Checks", "xtrain.cluster.checks:UnfinishedWork"
)
def test_what_is_left_at_the_end(what, words) -> None:
    with pytest.raises(UnfinishedWork, match=words):
        VirtualCluster(2).run(forgets, what)
    VirtualCluster(2, checks=False).run(forgets, what)
