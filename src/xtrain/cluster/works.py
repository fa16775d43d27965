# mypy: disable-error-code="override,assignment,misc"
"""The handles of calls under way: when they end, and how a rank waits for that."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.cluster.scheduler import Rank, Scheduler

KEPT_BYTES = 64  # of a result: torch's DDP asks for one of 4 bytes after the wait


class VirtualCall:
    """A call of one rank: it ends at a virtual time, well or with an error.

    Attributes:
        posted: its rank's clock when it was called.
        end: when it ends; None while that is not known.
        has_result: its tensors are there, which may be before it ends.
        early: its rank goes on as soon as they are.
        waited: whether its rank has waited for it.
        on_end: called with it when `end` is known.
    """

    __slots__ = (
        "call", "checks", "early", "end", "error", "has_result", "on_end", "posted",
        "rank", "scheduler", "waited",
    )  # fmt: skip

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.rank: Rank = scheduler.current
        self.rank.goes_on()
        self.posted = self.rank.clock
        self.end: float | None = None
        self.error: BaseException | None = None
        self.waited = self.has_result = self.early = False
        self.call: Any = None
        self.checks: Any = None
        self.on_end: Callable[[VirtualCall], object] | None = None

    def finish(self, end: float) -> None:
        """Its end is known; a rank that sleeps in it goes on then."""
        self.end = end
        if self.rank.waits_for is self:
            self.scheduler.wake(self.rank, end)
        if self.on_end is not None:
            self.on_end(self)

    def came(self, time: float) -> None:
        """All ranks have come to it by a time, and its tensors are there."""
        self.has_result = True
        if self.early and self.rank.waits_for is self:
            self.scheduler.wake(self.rank, time)

    def fail(self, error: BaseException) -> None:
        if self.end is None and self.error is None:
            self.error = error
            if self.rank.waits_for is self:
                self.scheduler.wake(self.rank, self.rank.clock)
            if self.on_end is not None:
                self.on_end(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Virtual time passes to the end of the call."""
        self.waited = True
        rank = self.rank
        while self.end is None:
            if self.error is not None:
                raise self.error
            self.scheduler.block(self)
        since = rank.clock
        if since < self.end:
            rank.clock = self.end
            if self.scheduler.recorder is not None:
                self.scheduler.recorder.waited(rank, since, self)
        if self.checks is not None:
            self.checks.after_wait(self)
        self.release()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended by now; virtual time passes a little if not."""
        if self.error is None and (self.end is None or self.end > self.rank.clock):
            self.scheduler.poll(self)
        if self.error is not None:
            return True
        done = self.end is not None and self.end <= self.rank.clock
        return done and self.wait()

    def is_success(self) -> bool:
        return self.error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        return self.error

    def release(self) -> None:
        """Give up what it holds: it has ended, and may be kept for long."""

    def describe(self) -> str:
        return str(self.call)

    def missing(self) -> list[int]:
        raise NotImplementedError


class VirtualWork(dist.Work):
    """A call under way as torch's C++ takes it.

    C++ may hold a work alone, and would wait forever on one whose Python half is gone.
    So its rank keeps it until it has been waited for, and some of them longer.
    """

    def __init__(self, call: VirtualCall, result: list[Tensor]):
        super().__init__()
        self._call, self._result = call, result
        self._open = call.rank.state.open_works
        self._open[id(self)] = self
        call.rank.state.late_works.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._open.pop(id(self), None)
        done = self._call.wait()
        if sum(tensor.nbytes for tensor in self._result) > KEPT_BYTES:
            self._result = []
        return done

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def is_success(self) -> bool:
        return self._call.is_success()

    def exception(self) -> BaseException | None:
        return self._call.error

    def result(self) -> list[Tensor]:
        return self._result

    def source_rank(self) -> int:
        return getattr(self._call, "peer", -1)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Its future, which holds the result at once when all ranks have called.

        C++ would wait for a future while no other rank can run. So the others come
        first, at their own clocks, and this rank goes on then; its clock comes to
        the end of the call where backward ends, which is where DDP waits.
        """
        future: torch.futures.Future = torch.futures.Future()
        call = self._call
        call.waited = call.early = True
        while not (call.has_result or call.end is not None or call.error is not None):
            call.scheduler.block(call)
        call.early = False
        if call.error is not None:
            future.set_exception(call.error)
        else:
            if torch._C._current_graph_task_id() != -1:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(call.wait)  # type: ignore[arg-type]
            else:
                call.wait()
            future.set_result(self._result)
        return future


class SeveralWorks(VirtualWork):
    """Calls of one group that end one after another, as one work."""

    def __init__(self, works: list[VirtualWork], result: list[Tensor]):
        super().__init__(works[-1]._call, result)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._open.pop(id(self), None)
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def get_future(self) -> torch.futures.Future:
        for work in self._works[:-1]:
            work.get_future()
        return super().get_future()
