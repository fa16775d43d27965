"""When everything happens: a schedule played with given times.

Each rank does its actions in order. One begins when the rank is free and what it needs
has arrived:

    F of stage s    after F of stage s - 1      ( + p2p if that is on another rank)
    B, BW           after B or BW of stage s + 1 (likewise), and after its own F
    W               after its own B

A message delays its receiver and occupies no rank. With equal stages this gives
the closed forms of the papers; times may also be lists, one entry a virtual stage.

    makespan        from the first start to the last end of all
    idle            of a rank: its last end - its first start - its work
    bubble          max(idle) / work, or max(idle) / (max(idle) + work): papers use both
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import Times, check_time, stage_times


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule with the start and the end of every action."""

    schedule: Schedule
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    works: tuple[float, ...]
    """Per rank: the time it computes."""

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(e[-1] for e in self.ends) - min(s[0] for s in self.starts)

    @property
    def work(self) -> float:
        """The time one rank computes; of unequal stages, that of the busiest rank."""
        return max(self.works)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank: its last end minus its first start minus its work."""
        return tuple(
            ends[-1] - starts[0] - work
            for starts, ends, work in zip(
                self.starts, self.ends, self.works, strict=True
            )
        )

    @property
    def bubble_over_ideal(self) -> float:
        """The longest idle time over the time of the work: (p - 1)/m for 1F1B.

        Of unequal stages, the ideal time is the busiest rank's work.
        """
        return max(self.idle) / self.work

    @property
    def idle_fraction(self) -> float:
        """The longest idle time over idle and work: (p - 1)/(m + p - 1) for 1F1B.

        Of unequal stages, the largest of the ranks' shares of their own time.
        """
        rows = zip(self.idle, self.works, strict=True)
        return max(idle / (idle + work) if idle else 0.0 for idle, work in rows)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank: most micro-batches between forward and backward at a time.

        A virtual stage's micro-batch counts 1 / chunks, whatever the stage costs. An
        overlapped pair counts its forward's before its backward frees one.
        """
        return self._peaks("B", "BW")

    @property
    def peak_until_weights(self) -> tuple[float, ...]:
        """Per rank: the same, but a micro-batch counts until its W.

        So far a rank keeps what its layers' weight gradients are computed from.
        """
        return self._peaks("W", "BW")

    def _peaks(self, *ends: str) -> tuple[float, ...]:
        chunks = self.schedule.chunks
        return tuple(_peak(actions, ends) / chunks for actions in self.schedule.actions)

    @property
    def parameter_copies(self) -> int:
        """How often the model's weights exist among the ranks."""
        return self.schedule.parameter_copies


def simulate(
    schedule: Schedule,
    forward: Times = 1.0,
    backward_input: Times = 1.0,
    backward_weight: Times = 1.0,
    overlapped: float | None = None,
    p2p: float = 0.0,
    all_to_all: float = 0.0,
) -> Timeline:
    """The times of every action; all durations are of one virtual stage.

    Args:
        forward: of F; one number, or a list with one for each virtual stage, which
            both directions of a mirrored schedule use.
        backward_input: of B, likewise.
        backward_weight: of W, likewise; BW takes both.
        overlapped: the compute of an overlapped pair; None means F of the one stage
            and B + W of the other.
        p2p: from the end of a stage to the earliest start of the next on another rank.
        all_to_all: what dispatch and combine of experts add to F, and again to B; under
            the compute of an overlapped pair those of both are hidden as far as it
            lasts.

    Raises:
        ValueError: a time is negative or not finite, a list has not one time for each
            virtual stage, or the schedule deadlocks (its ranks and the actions at
            which they wait are named).
    """
    for name, time in (("p2p", p2p), ("all_to_all", all_to_all)):
        check_time(name, time)
    if overlapped is not None:
        check_time("an overlapped pair", overlapped)
    f, b, w = (
        stage_times(schedule, name, times)
        for name, times in (
            ("F", forward),
            ("B", backward_input),
            ("W", backward_weight),
        )
    )
    exchanged = {
        "F": [time + all_to_all for time in f],
        "B": [time + all_to_all for time in b],
        "W": w,
        "BW": [one + other + all_to_all for one, other in zip(b, w, strict=True)],
    }

    def pair(stage: int, under: int) -> float:
        whole = f[stage] + b[under] + w[under] if overlapped is None else overlapped
        return max(whole, 2 * all_to_all)

    return _Player(schedule, exchanged, pair, p2p).play()


class _Player:
    """Runs each rank until it has to wait; what it waits for makes it ready again."""

    def __init__(
        self,
        schedule: Schedule,
        times: dict[str, list[float]],
        pair: Callable[[int, int], float],
        p2p: float,
    ):
        self.schedule, self.times, self.pair, self.p2p = schedule, times, pair, p2p
        slots = schedule.stages * schedule.micro_batches
        # when each is done, None before; index stage * micro_batches + micro_batch
        self.forwards: list[float | None] = [None] * slots
        self.backwards: list[float | None] = [None] * slots
        stages, last = range(schedule.stages), schedule.micro_batches - 1
        self.places = tuple(
            [schedule.rank_of(stage, i) for stage in stages] for i in (0, last)
        )
        mirrored = schedule.placement == "mirror"
        self.turning = schedule.micro_batches // 2 if mirrored else last + 1
        self.at = [0] * schedule.ranks
        self.free = [0.0] * schedule.ranks
        self.starts = tuple(array("d") for _ in range(schedule.ranks))
        self.ends = tuple(array("d") for _ in range(schedule.ranks))
        self.waiting: dict[tuple[bool, int], int] = {}

    def play(self) -> Timeline:
        ready = list(range(self.schedule.ranks))
        while ready:
            self._run(ready.pop(), ready)
        actions = self.schedule.actions
        stuck = [r for r, at in enumerate(self.at) if at < len(actions[r])]
        if stuck:
            waits = ", ".join(
                f"rank {r} at {actions[r][self.at[r]]}" for r in stuck[:4]
            )
            raise ValueError(f"{self.schedule.name} deadlocks: {waits}")
        works = tuple(
            sum(e - s for s, e in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )
        return Timeline(self.schedule, self.starts, self.ends, works)

    def _run(self, rank: int, ready: list[int]) -> None:
        """Go on with a rank until it is done or waits; add whom it wakes to `ready`."""
        actions, m = self.schedule.actions[rank], self.schedule.micro_batches
        starts, ends, now = self.starts[rank], self.ends[rank], self.free[rank]
        at, last = self.at[rank], len(actions)
        while at < last:
            action = actions[at]
            begin = self._begin(action, rank, now)
            if begin is None:
                break
            kind, under = action.kind, action.under
            if under is None:
                now = begin + self.times[kind][action.stage]
            else:
                now = begin + self.pair(action.stage, under.stage)
            starts.append(begin)
            ends.append(now)
            slot = action.stage * m + action.micro_batch
            if kind == "F":
                self.forwards[slot] = now
                self._wake(True, slot, ready)
            elif kind != "W":
                self.backwards[slot] = now
                self._wake(False, slot, ready)
            if under is not None:
                slot = under.stage * m + under.micro_batch
                self.backwards[slot] = now
                self._wake(False, slot, ready)
            at += 1
        self.at[rank], self.free[rank] = at, now

    def _begin(self, action: Action, rank: int, now: float) -> float | None:
        """When the action can begin; None if what it needs is not there yet."""
        kind, stage, i, under = action
        m, place = self.schedule.micro_batches, self.places[i >= self.turning]
        forward, slot = kind == "F", stage * m + i
        if kind == "W":
            return None if self.backwards[slot] is None else now
        if not forward and self.forwards[slot] is None:
            return None
        before = stage - 1 if forward else stage + 1
        if 0 <= before < len(place):
            slot = before * m + i
            there = (self.forwards if forward else self.backwards)[slot]
            if there is None:
                self.waiting[forward, slot] = rank
                return None
            now = max(now, there + self.p2p if place[before] != rank else there)
        return now if under is None else self._begin(under, rank, now)

    def _wake(self, forward: bool, slot: int, ready: list[int]) -> None:
        """Let the rank go on that waits for this stage and micro-batch."""
        rank = self.waiting.pop((forward, slot), None)
        if rank is not None:
            ready.append(rank)


def _peak(actions: Sequence[Action], ends: tuple[str, ...]) -> int:
    """Most forwards without what ends them, over the actions of a rank."""
    alive = peak = 0
    for kind, _, _, under in actions:
        if kind == "F":
            alive += 1
            peak = max(peak, alive)
            alive -= under is not None
        elif kind in ends:
            alive -= 1
    return peak
