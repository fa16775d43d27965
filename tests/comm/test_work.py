"""Work: wait for what is under way, finish, and hold on to memory until then."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from xtrain.comm.work import Work


class Message:
    """Something to wait for that writes down when."""

    def __init__(self, name, seen, error=None):
        self.name, self.seen, self.error = name, seen, error

    def wait(self):
        self.seen.append(self.name)
        if self.error is not None:
            raise self.error


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_it_waits_in_order_then_finishes_and_only_once():
    seen = []
    inner = Work([Message("first", seen)], lambda: seen.append("first is whole"))
    work = Work([inner, Message("second", seen)], lambda: seen.append("finished"))
    assert seen == []
    work.wait()
    work.wait()
    inner.wait()
    assert seen == ["first", "first is whole", "second", "finished"]
    Work().wait()  # a call that was over when it returned


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_memory_lives_until_the_wait_and_no_longer():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    work = Work(keep=(tensor,))
    del tensor
    gc.collect()
    assert alive() is not None
    work.wait()
    assert alive() is None


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_memory_is_free_when_it_finishes():
    tensor = torch.ones(3)
    alive, seen = weakref.ref(tensor), []
    holds_it_after_the_wait = Message("message", [])
    holds_it_after_the_wait.buffer = tensor
    works = [Work(keep=tensor), holds_it_after_the_wait]
    work = Work(works, lambda: seen.append(alive()), keep=[tensor])
    del tensor, works, holds_it_after_the_wait
    work.wait()
    assert seen == [None]


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_it_finishes_once_even_if_that_fails():
    work = Work(finish=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    work.wait()


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_an_error_is_raised_by_every_wait_and_nothing_is_finished():
    seen = []
    error = RuntimeError("connection lost")
    work = Work([Message("send", seen, error)], lambda: seen.append("finished"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection lost"):
            work.wait()
    assert seen == ["send", "send"]


def one_of_torchs():
    tensor = torch.ones(4)
    Work([dist.all_reduce(tensor, async_op=True)], lambda: tensor.mul_(10)).wait()
    return tensor.tolist()


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_what_torch_returns_can_be_waited_for(world):
    assert world(3).run(one_of_torchs) == [[30.0] * 4] * 3


@pytest.mark.verifies("xtrain.comm.work:Work")
def test_abandoned_work_ends_its_messages_and_leaves_the_result():
    """A collective of two halves sends the second one, used or not."""
    seen = []
    collective = Work(finish=lambda: seen.append("second half"))
    work = Work([collective], lambda: seen.append("finished"), keep=seen)
    work.abandon()
    assert seen == ["second half"]
    work.wait()
    assert seen == ["second half"]
