"""VirtualCluster: many ranks in one process, with exact messages and a virtual clock."""

import contextlib
import copy
import gc
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from xtrain.cluster import running
from xtrain.cluster.checks import Checks, UnfinishedWork
from xtrain.cluster.deadlock import Deadlock, what_is_wrong
from xtrain.cluster.group import NAME, Members, VirtualGroup
from xtrain.cluster.network import network_of
from xtrain.cluster.per_rank import Process, RankState
from xtrain.cluster.scheduler import Rank, Scheduler
from xtrain.cluster.store import VirtualStore
from xtrain.cluster.topology import Topology
from xtrain.testing.call_stack import stack_of
from xtrain.testing.errors import RankReport, RankTimeout, raised

LOOK_SECONDS = 0.2
STOP_SECONDS = 10.0
MANY_RANKS = 64  # from here on the collector of garbage would take a third of the time


class Stopped(BaseException):
    """Raised in ranks when the cluster is stopped: no handler of theirs catches it."""


class VirtualCluster:
    """`size` ranks that are threads of this process, one running at a time.

    Every process group of a rank is on the backend "xtrain-virtual"; a program that
    uses them runs unchanged. After a run `seconds` holds each rank's virtual clock.

    Args:
        size: the number of ranks.
        topology: how they are joined, see `xtrain.cluster.topology`; None: messages take
            no time.
        seed: draws another legal order of the ranks, of messages that may overtake one
            another and of moments at which bytes move; None: always the same order.
        checks: find buffers changed in flight, works that are not waited for and
            messages that are not received; costs some microseconds a call.
        limit: seconds of this machine that a rank may run without letting others; then
            it is taken for an endless loop, RankTimeout.
    """

    def __init__(
        self,
        size: int,
        topology: Topology | None = None,
        *,
        seed: int | None = None,
        checks: bool = True,
        limit: float = 120.0,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"a cluster needs at least one rank, got size={size}")
        if topology is not None:
            topology.check(size)
        self.size, self.topology, self.seed = size, topology, seed
        self.limit = limit
        self.seconds: list[float] = []
        self._with_checks = checks

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        Each rank gets copies of the arguments. Tensors in the results are detached. A
        function of two more parameters gets its rank and the size first.

        Raises RankError, which is also an instance of the first failing rank's
        exception type; Deadlock as soon as no rank can run; RankTimeout after `timeout`
        seconds of this machine, or when a rank does not let others run.
        """
        running.begin(self)
        try:
            with Process(lambda: self.scheduler.current.state.random):
                self._prepare()
                return self._run(fn, args, timeout)
        finally:
            running.end()

    def advance(self, seconds: float) -> None:
        """See `clock.advance`."""
        rank = self.scheduler.current
        rank.clock += seconds
        rank.polls = 0

    # -- groups ------------------------------------------------------------------------

    def make_group(self, rank: int, ranks: list[int], name: str) -> VirtualGroup:
        """A rank's end of a group: those of one name and the same ranks belong together."""
        me = self.scheduler.current.number
        key = name, tuple(ranks)
        joined = self._joined.get((me, key), 0)  # a name may be used again
        self._joined[me, key] = joined + 1
        members = self._members.get((key, joined))
        if members is None:
            members = Members(self.scheduler, self.network, ranks, name)
            self._members[key, joined] = members
        return VirtualGroup(rank, members, self.scheduler, self.checks)

    # ----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        ranks = [Rank(number) for number in range(self.size)]
        for rank in ranks:
            rank.state = RankState(rank.number, self.size, torch.get_default_dtype())
        self.scheduler = Scheduler(ranks, self.seed, swap, self._when_stuck)
        self.network = network_of(self.topology, self.scheduler)
        self.store = VirtualStore(lambda: self.scheduler)
        self.checks = Checks() if self._with_checks else None
        self._members: dict[Any, Members] = {}
        self._joined: dict[Any, int] = {}
        self._failures = 0

    def _run(
        self, fn: Callable[..., Any], args: tuple, timeout: float | None
    ) -> list[Any]:
        ranks = self.scheduler.ranks
        first = takes_rank_and_size(fn, args)
        for rank in ranks:
            place = (rank.number, self.size) if first else ()
            call = (fn, (*place, *copy.deepcopy(args)))
            rank.thread = threading.Thread(
                target=self._body, args=(rank, *call), daemon=True,
                name=f"xtrain rank {rank.number}",
            )  # fmt: skip
        with few_collections(self.size):
            overdue = self._live(timeout)
        self.seconds = [rank.clock for rank in ranks]
        if self.scheduler.crash is not None:
            raise self.scheduler.crash
        if overdue is not None:
            raise overdue
        self._raise_failures(getattr(fn, "__qualname__", repr(fn)))
        return [rank.result for rank in ranks]

    def _body(self, rank: Rank, fn: Callable[..., Any], args: tuple) -> None:
        """A rank's thread."""
        stay_on_one_core()
        rank.baton.acquire()
        try:
            if rank.stop is not None:
                raise rank.stop
            dist.init_process_group(
                NAME, store=self.store, rank=rank.number, world_size=self.size
            )
            result = fn(*args)
            rank.result = tree_map_only(Tensor, detached, result)
            del result
            self._check_ended(rank)
        except BaseException as error:
            self._failures += 1
            rank.error, rank.result = error, self._failures
        finally:
            self.scheduler.finish(rank)

    def _check_ended(self, rank: Rank) -> None:
        left = self.checks.unwaited(rank) if self.checks is not None else []
        if left:
            calls = "\n".join(f"  {call.describe()}" for call in left[:8])
            raise UnfinishedWork(f"never waited for:\n{calls}")

    def _live(self, timeout: float | None) -> RankTimeout | None:
        """Run all threads to their ends; what to raise when they had to be stopped."""
        ranks, started = self.scheduler.ranks, []
        try:
            for rank in ranks:
                rank.thread.start()
                started.append(rank)
            self.scheduler.begin()
            overdue = self._watch(timeout)
        except BaseException:  # Ctrl-C
            self._stop(started)
            raise
        for rank in ranks:
            rank.thread.join()
        return overdue

    def _watch(self, timeout: float | None) -> RankTimeout | None:
        begun = since = time.monotonic()
        turns = -1
        while not self.scheduler.ended.acquire(timeout=LOOK_SECONDS):
            now = time.monotonic()
            if self.scheduler.turns != turns:
                turns, since = self.scheduler.turns, now
            if now - since > self.limit:
                rank = self.scheduler.current.number
                return self._cut(
                    f"rank {rank} ran for {self.limit} s and let no other rank run"
                )
            if timeout is not None and now - begun > timeout:
                return self._cut(f"not finished after {timeout} s")
        return None

    def _cut(self, why: str) -> RankTimeout:
        """Stop all ranks; where each of them was."""
        frames, reports = sys._current_frames(), []
        for rank in self.scheduler.ranks:
            frame = frames.get(rank.thread.ident)
            if rank.done or frame is None:
                reports.append(RankReport(rank.number, "returned"))
            else:
                stack = stack_of(frame)
                summary = stack.summary
                if rank.waits_for is not None:
                    summary = f"waiting in {rank.waits_for.describe()}"
                reports.append(
                    RankReport(rank.number, "waiting", summary, stack.frames)
                )
        first = reports[self.scheduler.current.number]
        self._stop(self.scheduler.ranks)
        return RankTimeout(why, reports, first)

    def _stop(self, ranks: list[Rank]) -> None:
        """End all threads: those that sleep when their turn comes, the one that runs
        at its next line of Python.
        """
        for rank in ranks:
            rank.stop = Stopped()
        if self.scheduler.turns == 0:  # the first one was not let run yet
            for rank in ranks:
                rank.baton.release()
        end = time.monotonic() + STOP_SECONDS
        while any(rank.thread.is_alive() for rank in ranks):
            current = self.scheduler.current
            if not current.done and current.waits_for is None:
                interrupt(current.thread)
            time.sleep(0.001)
            if time.monotonic() > end:
                return  # it runs in C++, where nothing of ours reaches it

    def _when_stuck(self) -> bool:
        """No rank can run: those that wait raise, with what they wait for."""
        ranks = self.scheduler.ranks
        waiting = [rank for rank in ranks if rank.waits_for is not None]
        if not waiting:
            return False
        frames = sys._current_frames()
        lines = {
            rank.number: line_of(frames.get(rank.thread.ident)) for rank in waiting
        }
        for rank, error in what_is_wrong(ranks, lines).items():
            waits_for = rank.waits_for
            waits_for.fail(error)
            if rank.waits_for is not None:
                self.scheduler.wake(rank, rank.clock)
        return True

    def _raise_failures(self, name: str) -> None:
        ranks = self.scheduler.ranks
        failed = [rank for rank in ranks if rank.error is not None]
        if not failed:
            self._check_received()
            return
        reports = []
        for rank in ranks:
            if rank.error is None:
                reports.append(RankReport(rank.number, "returned"))
                continue
            error = rank.error
            trace = error.__traceback__ and error.__traceback__.tb_next
            reports.append(RankReport(
                rank.number, "raised",
                "".join(traceback.format_exception_only(error)).strip(),
                "".join(traceback.format_exception(type(error), error, trace)),
                error, rank.result,
            ))  # fmt: skip
        first = min(failed, key=lambda rank: rank.result)
        error = raised(name, reports, reports[first.number])
        if isinstance(error, Deadlock):
            error.cycle = first.error.cycle
        raise error

    def _check_received(self) -> None:
        if self.checks is None:
            return
        left = [m for members in self._members.values() for m in members.mailbox.left()]
        if left:
            calls = "\n".join(
                f"  rank {m.rank.number}: {m.describe()}" for m in left[:8]
            )
            raise UnfinishedWork(f"messages without their other end:\n{calls}")


def swap(rank: Rank | None, following: Rank) -> None:
    """Exchange what belongs to a rank and is kept once in a process."""
    if rank is not None:
        rank.state.save()
    following.state.load()


def detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def takes_rank_and_size(fn: Callable[..., Any], args: tuple) -> bool:
    """Whether `fn` takes two arguments more than it is given."""
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(fn)
        try:
            signature.bind(*args)
        except TypeError:
            signature.bind(0, 1, *args)
            return True
    return False


def stay_on_one_core() -> None:
    """This thread hands the baton over three times faster to one on its own core."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def few_collections(size: int) -> Any:
    """Collect garbage less often: what a large cluster holds is looked at each time."""
    if size < MANY_RANKS:
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def interrupt(thread: threading.Thread) -> None:
    """Raise Stopped in a thread, at its next line of Python."""
    import ctypes

    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))


def line_of(frame: Any) -> str:
    """The innermost line of a program in a stack."""
    from xtrain.backends.calls import KINDS, PROGRAM

    while frame is not None and KINDS[frame.f_globals.get("__name__", "")] != PROGRAM:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _create(options: Any, backend_options: Any) -> VirtualGroup:
    cluster = running.cluster()
    if cluster is None:
        raise RuntimeError(
            f'backend "{NAME}" is for ranks of a virtual cluster: '
            "VirtualCluster(size).run(fn)"
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = cluster.make_group(options.group_rank, ranks, options.group_id)
    group.set_timeout(options.timeout)
    return group


def register() -> None:
    """Make "xtrain-virtual" known to torch; doing it again does no harm."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "meta"]
        )
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorders is not None:
        recorders.add(NAME)


register()
