"""What is wrong, from the files of the ranks: who waits for whom, and who is missing.

    call number       1           2           3
    rank 0        all_reduce   barrier    all_reduce   waits
    rank 1        all_reduce   barrier    all_reduce   waits
    rank 2        all_reduce   barrier    -            is at train.py:40

Calls of a group have the same number on all its ranks. So the files tell where calls
differ first, and which ranks have not come to a call that others wait in. Messages
count for each pair of ranks. A circle of waits is found by `waits`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xtrain.comm import waits
from xtrain.comm.flight_recorder_files import (
    ANY,
    DEFAULT,
    Channel,
    DumpedCall,
    RankDump,
    in_words,
)

PATIENCE = 1.0  # seconds that a call may take in a run without fault
OF_TOTALS = {"all_gather": 1, "reduce_scatter": 0}  # the side that ranks share
OF_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather_single",
            "reduce_scatter_single", "_all_gather_base",
            "_reduce_scatter_base")  # fmt: skip
NO_FILE = "left no file: it was killed, is stopped, or cannot run Python"


class Report(NamedTuple):
    """Plain sentences; `fault` tells whether something is wrong."""

    lines: list[str]
    fault: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)


def diagnose(dumps: Sequence[RankDump]) -> Report:
    """What the files of a run tell, one dump a rank."""
    found = _Diagnosis(dumps)
    lines = [
        *found.errors(), *found.differences(), *found.stuck(), *found.stuck_messages(),
        *found.circle(),
    ]  # fmt: skip
    fault = bool(lines)
    if not fault:
        count = sum(len(dump.calls) for dump in dumps)
        lines.append(f"no fault: the {count} recorded calls of "
                     f"{in_words(found.dumps)} agree, and none waits")  # fmt: skip
    if found.missing:
        lines.append(f"{in_words(found.missing)} left no file")
    return Report(lines, fault)


class _Diagnosis:
    """Calls belong together that have one number in one channel."""

    def __init__(self, dumps: Sequence[RankDump]):
        self.dumps = {dump.rank: dump for dump in dumps}
        size = max(dump.ranks for dump in dumps)
        self.missing = [rank for rank in range(size) if rank not in self.dumps]
        self.calls: dict[Channel, dict[int, dict[int, DumpedCall]]]
        self.calls = defaultdict(lambda: defaultdict(dict))
        self.last: dict[Channel, Counter[int]] = defaultdict(Counter)
        for call in (call for dump in dumps for call in dump.calls):
            self.calls[call.channel][call.number][call.rank] = call
            self.last[call.channel][call.rank] = call.number
        raised = any(dump.reason.startswith("raised ") for dump in dumps)
        patience = 0.0 if raised else PATIENCE * 1e9
        self.waiting = {  # calls, and the ranks that have not come to them
            call: self._lacking(call)
            for dump in dumps
            for call in dump.calls
            if call.state == "failed"
            or (call.state == "started" and dump.time - call.created >= patience)
        }
        self.held = {rank: self._call_that_holds(rank) for rank in self.dumps}

    # -- who waits for whom

    def _lacking(self, call: DumpedCall) -> list[int]:
        if call.is_message:
            members: Iterable[int] = {call.peer} - {ANY}
        elif call.group.ranks or call.group.description != DEFAULT:
            members = call.group.ranks or self.last[call.channel]
        else:  # torch does not tell them
            members = (*self.dumps, *self.missing)
        return sorted(rank for rank in members if not self._has_come(rank, call))

    def _has_come(self, rank: int, call: DumpedCall) -> bool:
        if call.is_message and not call.number:
            end = self.calls[call.channel][0].get(rank)
            return end is not None and end.state != "completed"
        return self.last[call.channel][rank] >= call.number

    def _call_that_holds(self, rank: int) -> DumpedCall | None:
        """The call in which a rank waits: at its present line, else the oldest."""
        calls = [call for call in self.waiting if call.rank == rank]
        lacking = [call for call in calls if self.waiting[call]] or calls
        here = [call for call in lacking if call.line == self.dumps[rank].line]
        return next(iter(here[::-1] or lacking), None)

    # -- in words

    def errors(self) -> Iterator[str]:
        failed = [d for d in self.dumps.values() if d.reason.startswith("raised ")]
        for dump in sorted(failed, key=lambda dump: dump.time):
            yield f"rank {dump.rank} {dump.reason} at {dump.line}"

    def differences(self) -> Iterator[str]:
        for channel in sorted(self.calls, key=len):  # messages after collectives
            number = self._first_difference(channel)
            if number is not None:
                of_message = f"message {number} has ends of two sizes"
                of_group = f"{channel[0]}: calls differ first at call {number}"
                yield of_message if len(channel) > 1 else of_group
                calls = self.calls[channel][number].values()
                for text, ranks in _grouped((str(call), call.rank) for call in calls):
                    yield f"  {in_words(ranks)}: {text}"

    def _first_difference(self, channel: Channel) -> int | None:
        for number, calls in sorted(self.calls[channel].items()):
            if len({_signature(call) for call in calls.values()}) > 1:
                return number
        return None

    def stuck(self) -> Iterator[str]:
        """For each group, its first call in which ranks wait."""
        for channel, numbers in self.calls.items():
            late = [call for call in self.waiting if call.channel == channel]
            if (
                len(channel) > 1
                or not late
                or self._first_difference(channel) is not None
            ):
                continue
            lacking = [call for call in late if self.waiting[call]]
            number = min(call.number for call in lacking or late)
            calls = numbers[number].values()
            waiting = [call for call in calls if call in self.waiting]
            call = waiting[0]
            yield f"{call.group} is stuck at call {number}, {call.op}({call.tensors})"
            for line, ranks in _grouped((c.line, c.rank) for c in waiting):
                wait = "wait" if len(ranks) > 1 else "waits"
                yield f"  {in_words(ranks)} {wait} at {line}"
            yield from self._absent(call)
            if not self.waiting[call]:
                yield from _all_came(calls)

    def stuck_messages(self) -> Iterator[str]:
        for call in self.waiting:
            if call.is_message:
                yield f"rank {call.rank} waits in {call}"
                yield from self._absent(call)

    def circle(self) -> Iterator[str]:
        states = []
        for rank, call in self.held.items():
            if call is not None:
                needs = tuple(waits.Need(other) for other in self.waiting[call])
                wait = waits.Wait(rank, f"{call} in {call.group}", needs)
                states.append(waits.RankWaits(rank, wait))
        circle = waits.find_circle(states)
        if len(circle) > 1:
            yield waits.in_words(circle)

    def _absent(self, call: DumpedCall) -> Iterator[str]:
        """The ranks that a call waits for, and what they do."""
        for rank in self.waiting[call]:
            missed = f"has not {'received' if call.op == 'send' else 'sent'} it:"
            if not call.is_message:
                number = self.last[call.channel][rank]
                missed = f"is missing: its last call there is number {number}, and"
            does = NO_FILE if rank in self.missing else f"{missed} it {self._is(rank)}"
            yield f"  rank {rank} {does}"

    def _is(self, rank: int) -> str:
        dump, call = self.dumps[rank], self.held[rank]
        if call is not None:
            return f"waits in {call} in {call.group}"
        if dump.reason.startswith("raised "):
            return f"{dump.reason} at {dump.line}"
        if dump.reason == "ended":
            return f"has ended, last seen at {dump.line}"
        return f"is at {dump.line}"


def _all_came(calls: Iterable[DumpedCall]) -> Iterator[str]:
    yield "  all its ranks have come to it"
    in_order = sorted(calls, key=lambda call: call.created)
    first, last = in_order[0], in_order[-1]
    seconds = (last.created - first.created) / 1e9
    if seconds > PATIENCE:
        yield (f"  rank {last.rank} came last, {seconds:.1f} s after rank "
               f"{first.rank}, at {last.line}")  # fmt: skip


def _signature(call: DumpedCall) -> tuple:
    """What the calls of one number have in common."""
    if call.is_message:
        return (call.number and sum(call.sizes[call.op == "recv"]),)
    shared: object = None
    if call.op in OF_TOTALS:
        shared = sum(call.sizes[OF_TOTALS[call.op]])
    elif call.op in OF_SIZES:
        shared = call.sizes
    return call.op, call.root, call.dtypes, shared


def _grouped(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for text, rank in pairs:
        groups[text].append(rank)
    return list(groups.items())
