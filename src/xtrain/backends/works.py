# mypy: disable-error-code="override,assignment,misc"
"""What torch waits for: the handle of a call."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.backends.messages import Receive
from xtrain.backends.observers import observed, unobserved
from xtrain.backends.operation import Operation
from xtrain.backends.progress import Progress


class WorkFuture(torch.futures.Future):
    """The future of a call under way: callbacks that wait for it hold up no others."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def wait(self) -> list[Tensor]:
        self._progress.callbacks.step_aside()
        return super().wait()


class Handle(dist.Work):
    """What every work of ours tells; subclasses wait."""

    def __init__(self, result: list[Tensor]):
        super().__init__()
        self._result = result

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return self._result


class Finished(Handle):
    """The work of a call that has returned already."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


class Several(Handle):
    """The work of several calls, as one."""

    def __init__(self, works: list[dist.Work], result: list[Tensor]):
        super().__init__(result)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        end = time.monotonic() + timeout.total_seconds() if timeout else 0.0
        for work in self._works:
            left = timedelta(seconds=max(0.001, end - time.monotonic()))
            work.wait(left if timeout else timedelta())  # of 0: no timeout
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        errors = (work.exception() for work in self._works if not work.is_success())
        return next(errors, None)

    def get_future(self) -> torch.futures.Future:
        def value(done: torch.futures.Future) -> list[Tensor]:
            for future in done.value():
                future.value()  # raises what its call raised
            return self._result

        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(value)


class Pending(Handle):
    """The work of a call under way."""

    def __init__(self, progress: Progress, operation: Operation, result: list[Tensor]):
        super().__init__(result)
        self._progress, self._operation = progress, operation
        self._receive: Receive | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._operation.done and self._operation.error is None:
            return True
        seconds = timeout.total_seconds() if timeout else float("inf")
        if observed():
            with unobserved():
                self._progress.wait(self._operation, seconds)
        else:
            self._progress.wait(self._operation, seconds)
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def exception(self) -> BaseException | None:
        return self._operation.error

    def source_rank(self) -> int:
        """The group rank whose message a receive took."""
        source = None if self._receive is None else self._receive.source
        return -1 if source is None else source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        future = WorkFuture(self._progress)
        operation = self._operation

        def settle() -> None:
            if operation.error is None:
                future.set_result(self._result)
            else:
                future.set_exception(operation.error)

        self._progress.when_ended(operation, settle)
        return future
