"""VirtualCluster: many ranks in one process, exact messages, a virtual clock."""

import contextlib
import copy
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from xtrain.cluster import running
from xtrain.cluster.checks import Checks, UnfinishedWork
from xtrain.cluster.compute import Device, Made, accelerator_of, watching_resizes
from xtrain.cluster.deadlock import what_is_wrong
from xtrain.cluster.group import NAME, Members, VirtualGroup
from xtrain.cluster.network import network_of
from xtrain.cluster.outcome import failure_of
from xtrain.cluster.per_rank import Process, RankState
from xtrain.cluster.rank_threads import RankThreads
from xtrain.cluster.recorder import RunRecord, RunRecorder
from xtrain.cluster.scheduler import Rank, Scheduler
from xtrain.cluster.store import VirtualStore
from xtrain.cluster.symmetry import Alike, stand_ins_of
from xtrain.cluster.threads import (
    Interrupts,
    few_collections,
    line_of,
)
from xtrain.cluster.topology import Topology
from xtrain.plan.hardware import Accelerator

LOOK_SECONDS = 0.2
STOP_SECONDS = 10.0
SHOWN_TRACES = 8


class VirtualCluster:
    """`size` ranks that are threads of this process, one running at a time.

    Every process group of a rank is on the backend "xtrain-virtual"; a program that
    uses them runs unchanged. After a run `seconds` holds each rank's virtual clock, and
    `devices` what each rank's accelerator counted.

    Args:
        size: the number of ranks.
        topology: how they are joined, see `xtrain.cluster.topology`; None: messages
            take no time.
        seed: draws another legal order of ranks, of messages that may overtake one
            another, of moments at which bytes move; None: always the same order.
        checks: find buffers changed in flight, works that are not waited for and
            messages that are not received; costs some microseconds a call.
        accelerator: a preset of `xtrain.plan`, as "h100": every operator of a rank then
            takes the virtual time that it would take there, and its memory is counted,
            see `compute.Device`; None: only `advance` lets ranks compute.
        limit: seconds of this machine that a rank may run without letting others; then
            it is taken for an endless loop, RankTimeout.
        record: keep what each rank did in virtual time, as `record` after a run.
        alike: for each rank the one that runs in its place, see `symmetry`; None: all
            run.
    """

    def __init__(
        self,
        size: int,
        topology: Topology | None = None,
        *,
        seed: int | None = None,
        checks: bool = True,
        limit: float = 120.0,
        accelerator: str | Accelerator | None = None,
        record: bool = False,
        alike: Alike | None = None,
    ) -> None:
        if type(size) is not int or size < 1:
            raise ValueError(f"a cluster needs at least one rank, got size={size}")
        if topology is not None:
            topology.check(size)
        self.size, self.topology, self.seed = size, topology, seed
        self.limit = limit
        self.stand_ins = stand_ins_of(size, alike)
        self.accelerator = accelerator_of(accelerator)
        self.seconds: list[float] = []
        self.devices: list[Device | None] = []
        self.record: RunRecord | None = None
        self._with_checks, self._recording = checks, record

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
        calls = self._calls(fn, args)
        with Interrupts() as interrupts:
            running.begin(self)
            try:
                with Process(self._on_rank):
                    self._prepare()
                    return self._run(calls, timeout, interrupts)
            finally:
                running.end()
        raise AssertionError("unreachable: Interrupts raises what it has held back")

    def _on_rank(self) -> Rank | None:
        """The rank whose thread this is."""
        rank = self.scheduler.current
        return rank if rank.thread is threading.current_thread() else None

    def _device(self) -> Device | None:
        """Of the rank whose thread this is."""
        rank = self._on_rank()
        return None if rank is None else rank.state.device

    def _calls(self, fn: Callable[..., Any], args: tuple) -> list["partial[Any]"]:
        """The call of each rank, with its own copies of the arguments."""
        first = takes_rank_and_size(fn, args)
        calls = []
        for rank in sorted(set(self.stand_ins)):
            place = (rank, self.size) if first else ()
            try:
                calls.append(partial(fn, *place, *copy.deepcopy(args)))
            except Exception as error:
                raise ValueError(
                    f"each rank gets a copy of the arguments: {error}"
                ) from error
        return calls

    def advance(self, seconds: float) -> None:
        """See `clock.advance`."""
        rank = self.scheduler.current
        rank.clock += seconds
        rank.goes_on()

    # -- groups ------------------------------------------------------------------------

    def make_group(self, rank: int, ranks: list[int], name: str) -> VirtualGroup:
        """A rank's end of a group, which its name and ranks tell."""
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
        ranks = [Rank(number) for number in sorted(set(self.stand_ins))]
        known: dict[Any, Made] = {}
        for rank in ranks:
            rank.state = RankState(rank.number, self.size, torch.get_default_dtype())
            if self.accelerator is not None:
                rank.state.device = Device(self.accelerator, self.advance, known)
        recorder = RunRecorder(self.size) if self._recording else None
        self.scheduler = Scheduler(
            ranks, self.seed, swap, self._when_stuck, self.stand_ins, recorder
        )
        self.network = network_of(self.topology, self.scheduler)
        self.store = VirtualStore(lambda: self.scheduler)
        self.checks = Checks() if self._with_checks else None
        self._members: dict[Any, Members] = {}
        self._joined: dict[Any, int] = {}

    def _run(
        self,
        calls: list["partial[Any]"],
        timeout: float | None,
        interrupts: Interrupts,
    ) -> list[Any]:
        ranks = self.scheduler.ranks
        by_number = {rank.number: rank for rank in ranks}
        every = [by_number[number] for number in self.stand_ins]
        self.devices = [rank.state.device for rank in every]
        with few_collections(self.size), watching_resizes(self._device):
            programs = [
                partial(self._program, *each) for each in zip(ranks, calls, strict=True)
            ]
            overdue = RankThreads(self.scheduler, self.limit).run(
                programs, timeout, interrupts
            )
        self.seconds = [rank.clock for rank in every]
        if self.scheduler.recorder is not None:
            self.record = self.scheduler.recorder.record(
                self.seconds, self.network.use()
            )
        if interrupts.held_back:
            return []
        if self.scheduler.crash is not None:
            raise self.scheduler.crash
        if overdue is not None:
            raise overdue
        call = calls[0].func
        failure = failure_of(ranks, getattr(call, "__qualname__", repr(call)))
        if failure is not None:
            raise failure
        self._check_received()
        return [rank.result for rank in every]

    def _program(self, rank: Rank, call: Callable[[], Any]) -> None:
        if rank.stop is not None:
            raise rank.stop
        dist.init_process_group(
            NAME, store=self.store, rank=rank.number, world_size=self.size
        )
        with rank.state.device or contextlib.nullcontext():
            result = call()
        rank.result = tree_map_only(Tensor, detached, result)
        self._check_ended(rank)

    def _check_ended(self, rank: Rank) -> None:
        left = self.checks.unwaited(rank) if self.checks is not None else []
        if left:
            calls = "\n".join(f"  {call.describe()}" for call in left[:8])
            raise UnfinishedWork(f"never waited for:\n{calls}")

    def _when_stuck(self) -> bool:
        """No rank can run: those that wait raise, with what they wait for."""
        ranks, frames = self.scheduler.ranks, sys._current_frames()
        lines = {
            rank.number: line_of(frames.get(rank.thread.ident or 0))
            for rank in ranks
            if rank.needs is not None
        }
        errors = what_is_wrong(ranks, lines)
        for rank, error in errors.items():
            assert rank.needs is not None
            rank.needs.fail(error)
            if rank.waits_for is not None:
                self.scheduler.wake(rank, rank.clock)
        return bool(errors)

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
