"""Collectives: the k-th call of each rank in a group belongs to the k-th of all others.

    rank 0   all_reduce #7 --+
    rank 1   all_reduce #7 --+-> all have come: results are computed, the network tells
    rank 2   all_reduce #7 --+   when each rank has them

Calls of a group run one after another, as on a communicator's stream. Ranks in
different calls all raise, with each rank's call.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from xtrain.backends.calls import CollectiveCall, CollectiveMismatch
from xtrain.cluster.compute import unseen
from xtrain.cluster.moves import MOVES, Part
from xtrain.cluster.scheduler import Scheduler
from xtrain.cluster.symmetry import parts_of_all
from xtrain.cluster.works import VirtualCall


class MismatchedCollectives(RuntimeError):
    """Ranks of a group are in different collectives."""


class CollectiveWork(VirtualCall):
    """One rank's part of a collective."""

    __slots__ = ("part", "slot", "tensors")

    def __init__(self, scheduler: Scheduler, call: CollectiveCall, part: Part):
        super().__init__(scheduler)
        self.call, self.part = call, part
        self.slot: CollectiveSlot | None = None
        self.tensors: Sequence[Tensor] = ()

    def release(self) -> None:
        self.part = Part(self.part.kind, (), ())
        self.tensors = ()

    def describe(self) -> str:
        assert self.slot is not None
        text, at, site = str(self.call).rpartition(" at ")
        return f"{text}{self.slot.group.in_words()}{at}{site}"

    @property
    def ranks(self) -> Sequence[int]:
        assert self.slot is not None
        return self.slot.group.ranks  # type: ignore[no-any-return]

    def missing(self) -> list[int]:
        assert self.slot is not None
        ranks = self.slot.group.ranks
        return [
            ranks[r]
            for r, work in enumerate(self.slot.works)
            if work is None and self.slot.group.stand_ins[r] == r
        ]


def has_data(parts: Sequence[Part]) -> bool:
    """Whether there are bytes to move; ValueError where some ranks give none."""
    on_meta = {t.is_meta for part in parts for t in (*part.inputs, *part.outputs)}
    if len(on_meta) == 2:
        raise ValueError("some tensors of this call are on meta and others are not")
    return True not in on_meta


class CollectiveSlot:
    """The k-th collective of a group: a place for each rank."""

    __slots__ = ("broken", "first", "group", "left", "works")

    def __init__(self, group: Any):
        self.group = group
        self.works: list[CollectiveWork | None] = [None] * len(group.ranks)
        self.first: CollectiveWork | None = None  # that came
        self.left = group.running
        self.broken: str | None = None  # why its calls have failed


class CollectiveCalls:
    """The collectives of one group."""

    def __init__(self, scheduler: Scheduler, network: Any, group: Any):
        self._scheduler, self._network, self._group = scheduler, network, group
        self._slots: dict[int, CollectiveSlot] = {}
        self._counts = [0] * len(group.ranks)
        self._free = 0.0  # when the communicator's stream is
        self._under_way: deque[Callable[[], None]] = deque()  # one after another

    def post(self, work: CollectiveWork, rank: int) -> None:
        """A rank has come to its next collective."""
        number = self._counts[rank]
        self._counts[rank] += 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = CollectiveSlot(self._group)
        work.slot, slot.works[rank] = slot, work
        slot.left -= 1
        if slot.first is None:
            slot.first = work
        elif slot.broken is None and slot.first.call[:4] != work.call[:4]:
            self._break(slot, self._all_calls(slot))
        if slot.broken is not None:
            work.fail(MismatchedCollectives(slot.broken))
        elif slot.left == 0:
            self._run(slot)
        if slot.left == 0:
            del self._slots[number]

    def _all_calls(self, slot: CollectiveSlot) -> str:
        lines = [
            f"the ranks of this group are in different calls{self._group.in_words()}:"
        ]
        for rank, work in zip(self._group.ranks, slot.works, strict=True):
            called = "has not called yet" if work is None else str(work.call)
            lines.append(f"  rank {rank}: {called}")
        return "\n".join(lines)

    def _break(self, slot: CollectiveSlot, text: str) -> None:
        slot.broken = text
        for work in slot.works:
            if work is not None:
                work.fail(MismatchedCollectives(text))

    def _run(self, slot: CollectiveSlot) -> None:
        works = [work for work in slot.works if work is not None]
        draw = self._scheduler.draw
        late = draw is not None and draw.random() < 0.5  # as late as is legal
        parts = parts_of_all(slot.works, self._group.stand_ins)
        if not late and not self._move(slot, works, parts):
            return
        start = 0.0

        def begin() -> None:
            nonlocal start
            start = max(self._free, last)
            self._network.collective(
                parts, self._group.ranks, start, self._scheduler.shaken(ended)
            )

        def ended(end: float) -> None:
            self._free = max(self._free, end)
            if recorder is not None:
                recorder.collective(works[0], self._group.ranks, start, end)
            if not late or self._move(slot, works, parts):
                for work in works:
                    work.finish(end)
            self._under_way.popleft()
            if self._under_way:
                self._under_way[0]()

        recorder = self._scheduler.recorder
        last = max(work.posted for work in works)
        if not late:
            for work in works:
                work.came(last)
        self._under_way.append(begin)
        if len(self._under_way) == 1:
            begin()

    def _move(
        self, slot: CollectiveSlot, works: Sequence[CollectiveWork], parts: list[Part]
    ) -> bool:
        """Compute all ranks' results; False when their tensors do not fit together."""
        for work in works:
            if work.checks is not None:
                work.checks.before_collective(work)
        try:
            if has_data(parts):
                with unseen():
                    MOVES[parts[0].kind](parts)
        except (ValueError, CollectiveMismatch) as error:
            self._break(slot, f"{error}\n{self._all_calls(slot)}")
            return False
        for work in works:
            if work.checks is not None:
                work.checks.after_collective(work)
        return True
