"""What torch asks of the work of a call, before its end and after it."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from xtrain.backends.operation import Operation
from xtrain.backends.progress import Progress
from xtrain.backends.works import Finished, Pending, Several

SHORT = timedelta(seconds=0.05)


@pytest.fixture
def progress() -> Iterator[Progress]:
    progress = Progress(lambda operation: None)
    yield progress
    progress.close(RuntimeError("the test is over"))


class Held:
    """A call that ends when it is told to, well or with an error."""

    def __init__(self, progress: Progress, name: str):
        self._ended, self._error = False, None
        operation = Operation(name, self._steps())
        self.result = [torch.ones(1)]
        progress.post(name, operation)
        self.work = Pending(progress, operation, self.result)

    def _steps(self):
        while not self._ended:
            yield
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None = None) -> None:
        self._error, self._ended = error, True


@pytest.mark.verifies("xtrain.backends.works:Pending")
def test_a_pending_call_tells_how_far_it_is(progress):
    call = Held(progress, "one")
    work, future = call.work, call.work.get_future()
    assert (work.is_completed(), work.is_success(), work.exception()) == (
        False,
        False,
        None,
    )
    assert not future.done()
    with pytest.raises(RuntimeError, match=r"not done after 0.05 s: one"):
        work.wait(SHORT)
    call.end()
    assert work.wait() is True
    assert work.wait(SHORT) is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() is call.result
    assert future.wait() is call.result
    assert work.get_future().wait() is call.result


@pytest.mark.verifies("xtrain.backends.works:Pending")
def test_a_call_that_fails_is_completed_and_no_success(progress):
    call = Held(progress, "one")
    before, error = call.work.get_future(), ValueError("lost")
    call.end(error)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            call.work.wait()
    assert call.work.is_completed() and not call.work.is_success()
    assert call.work.exception() is error
    for future in (before, call.work.get_future()):
        with pytest.raises(Exception, match="lost"):
            future.wait()


@pytest.mark.verifies("xtrain.backends.works:Several")
def test_several_calls_end_with_the_last_of_them(progress):
    first, second = Held(progress, "first"), Held(progress, "second")
    result = [*first.result, *second.result]
    work = Several([Finished([]), first.work, second.work], result)
    future = work.get_future()
    assert not work.is_completed() and not work.is_success()
    first.end()
    with pytest.raises(RuntimeError, match="not done after .* s: second"):
        work.wait(SHORT)
    assert first.work.is_completed()
    assert not work.is_completed() and not work.is_success() and not future.done()
    second.end()
    assert work.wait(timedelta(seconds=60)) is True
    assert work.is_completed() and work.is_success()
    assert work.result() is result
    assert future.wait() == result


@pytest.mark.verifies("xtrain.backends.works:Several")
def test_several_calls_fail_with_any_of_them(progress):
    first, second = Held(progress, "first"), Held(progress, "second")
    work = Several([first.work, second.work], [])
    future = work.get_future()
    first.end()
    second.end(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(Exception, match="lost"):
        future.wait()


@pytest.mark.verifies("xtrain.backends.works:Finished")
def test_a_call_that_has_returned_is_done():
    result = [torch.ones(2)]
    work = Finished(result)
    assert work.wait() is True and work.wait(SHORT) is True
    assert work.is_completed() and work.is_success()
    assert work.result() is result
    assert work.get_future().wait() is result


def counted() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group, x = dist.group.WORLD, torch.ones(2)
    counts = [group._get_sequence_number_for_group()]
    dist.all_reduce(x)
    counts.append(group._get_sequence_number_for_group())
    dist.all_reduce(x, async_op=True).wait()
    counts.append(group._get_sequence_number_for_group())
    request = dist.irecv(torch.empty(2), (rank - 1) % size)
    counts.append(group._get_sequence_number_for_group())
    dist.send(x, (rank + 1) % size)
    request.wait()
    counts.append(group._get_sequence_number_for_group())
    return [count - counts[0] for count in counts]


def test_every_call_is_counted_once(ours):
    """What a run that went wrong has sent is told from it."""
    assert ours(2).run(counted) == [[0, 1, 2, 3, 4]] * 2


def different_calls() -> list[str]:
    """Asynchronous calls that fail: sooner or later than they return."""
    rank, said = dist.get_rank(), []
    for numel in (1, 3, 300_000):
        for _ in range(5):
            work = dist.all_reduce(torch.ones(numel + rank), async_op=True)
            with pytest.raises(RuntimeError, match="in different calls") as error:
                work.wait()
            assert work.is_completed() and not work.is_success()
            said.append(str(error.value))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    return said


def test_a_call_that_fails_before_it_returns_fails_when_waited_for(ours):
    first, second = ours(2).run(different_calls)
    assert first == second
    assert "[1] float32" in first[0] and "[2] float32" in first[0]
