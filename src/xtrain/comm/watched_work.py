# mypy: disable-error-code="override,misc"
"""The work of a call as torch hands it out, and a note when it has been waited for."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class WatchedWork(dist.Work):
    """A call under way: `note` is called once it is known to be over.

    An instrument puts it in place of the work of a call, from outside.
    """

    def __init__(self, work: dist.Work, note: Callable[[], None]):
        super().__init__()
        self._work, self._note = work, note

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        result = self._work.wait(timeout)
        self._note()
        return result

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._note()
        return completed

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank
