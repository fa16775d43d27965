"""What a race is made of.

    Race         a title, its contestants (the first is the baseline), sizes, ranks
    Contestant   a name and `make`, which builds its state on each rank
    Trial        what `make` returns: the call that is timed, the tensors it leaves

A race is data: `make`, `reference` and `traffic` are functions at the top level of a
module (or `functools.partial` of such), because every rank imports them by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xtrain.plan import Traffic


class RaceError(ValueError):
    """A race that must not be timed: a wrong result or a wrong number of bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One start: the size, and how many ranks on which device.

    `size` is in bytes for collectives; a race may give it another meaning. The rank
    comes from `torch.distributed`, which is set up when `make` is called.
    """

    size: int
    ranks: int
    device: str = "cpu"


@dataclass(frozen=True)
class Trial:
    """A contestant ready to run, on one rank.

    `call` does the work once; it is checked and then timed many times. `outputs`
    are the tensors that the checked calls leave: they must equal the race's reference.
    `reset` runs after the check and puts the state where any number of calls is
    safe (an in-place sum of ones would leave a float's range).
    """

    call: Callable[[], object]
    outputs: Sequence[Tensor]
    reset: Callable[[], object] | None = None


@dataclass(frozen=True)
class Contestant:
    """One side of a race.

    `traffic` gives the bytes that each rank sends and receives in one call; then a
    ledger must count exactly these. None where only the backend knows. `ranks`
    restricts the contestant to these world sizes; empty means all.
    """

    name: str
    make: Callable[[Case], Trial]
    traffic: Callable[[Case], Traffic] | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Goal:
    """`contestant` should be at least `ratio` times as fast as the baseline."""

    contestant: str
    ratio: float
    size: int
    ranks: int


@dataclass(frozen=True)
class Race:
    """Contestants that compute the same, timed side by side.

    `reference` returns what every contestant must leave on this rank; None takes the
    baseline's outputs. `tolerance` is the largest absolute difference allowed.
    Outputs are compared after `checked_calls` calls: a training step shows in the
    weights of the next. With `memory` each contestant also runs once more in processes
    of its own, to see how much memory it takes.
    `single` times every call separately, after a barrier, as in a step with one small
    collective; otherwise calls follow each other. A single call is too short to
    measure other load: all samples are kept. `rounds` samples of each contestant are
    wanted; None leaves it to the settings.
    """

    name: str
    title: str
    contestants: tuple[Contestant, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = (2, 4)
    reference: Callable[[Case], Sequence[Tensor]] | None = None
    tolerance: float = 0.0
    goals: tuple[Goal, ...] = ()
    backend: str = "gloo"
    single: bool = False
    checked_calls: int = 1
    memory: bool = False
    rounds: int | None = None

    def __post_init__(self) -> None:
        names = [contestant.name for contestant in self.contestants]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(
                f"race {self.name}: needs at least two contestants with different "
                f"names, got {names}"
            )
        if self.contestants[0].ranks:
            raise ValueError(
                f"race {self.name}: the baseline {names[0]} must run at every size"
            )
        unknown = {goal.contestant for goal in self.goals} - set(names)
        if unknown:
            raise ValueError(
                f"race {self.name}: goals for {sorted(unknown)}, who do not run"
            )

    def participants(self, case: Case) -> list[Contestant]:
        """The contestants that run this case, the baseline first."""
        return [c for c in self.contestants if not c.ranks or case.ranks in c.ranks]

    def goal(self, contestant: str, case: Case) -> float | None:
        """The ratio asked of a contestant in this case, if any."""
        for goal in self.goals:
            if (goal.contestant, goal.size, goal.ranks) == (
                contestant,
                case.size,
                case.ranks,
            ):
                return goal.ratio
        return None


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it so far."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
