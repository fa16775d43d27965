# mypy: disable-error-code="override,assignment,misc"
"""What torch waits for: the handle of a call."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.backends.messages import Receive
from xtrain.backends.progress import Operation, Progress


class Finished(dist.Work):
    """The work of a call that has returned already."""

    def __init__(self, result: list[Tensor]):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


class Pending(dist.Work):
    """The work of a call under way."""

    def __init__(self, progress: Progress, operation: Operation, result: list[Tensor]):
        super().__init__()
        self._progress, self._operation, self._result = progress, operation, result
        self._receive: Receive | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._operation.done and self._operation.error is None:
            return True
        seconds = timeout.total_seconds() if timeout else float("inf")
        self._progress.wait(self._operation, seconds)
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> list[Tensor]:
        return self._result

    def _source_rank(self) -> int:
        """The group rank whose message a receive took."""
        source = None if self._receive is None else self._receive.source
        return -1 if source is None else source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        operation = self._operation

        def settle() -> None:
            if operation.error is None:
                future.set_result(self._result)
            else:
                future.set_exception(operation.error)

        self._progress.when_ended(operation, settle)
        return future
