"""Wait for one answer of each of several processes, and describe what went wrong.

    all answered            -> go on
    one raised or died      -> a short grace for the others, then cut
    the deadline passed     -> cut

A cut asks every process that is still busy for its stack before any is ended.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from xtrain.testing.errors import RankError, RankReport, from_reports
from xtrain.testing.outcome import Outcome, load_error
from xtrain.testing.process import RankProcess, stacks_of

# After one rank failed, the others get this long to fail or finish by themselves:
# they may sit in a collective that will never complete.
GRACE = 1.0
# How often a wait looks for dead processes whose pipe a grandchild keeps open.
_LOOK = 0.2


@dataclass(slots=True)
class Ending:
    """The answers, and the ranks that died; a rank in neither was still busy."""

    answers: dict[int, Outcome] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def failed(self) -> bool:
        """Whether a rank died or raised."""
        return bool(self.dead) or any(
            answer.kind == "raised" for answer in self.answers.values()
        )

    def complete(self, size: int) -> bool:
        """Whether all `size` ranks answered without a failure."""
        return len(self.answers) == size and not self.failed()


def collect(ranks: Sequence[RankProcess], timeout: float | None) -> Ending:
    """Wait for one answer of each rank, until the deadline or the grace is over."""
    ending = Ending()
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    in_grace = False
    while pending := _pending(ranks, ending):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        pipes: dict[object, int] = {ranks[number].jobs: number for number in pending}
        awaited = [ranks[number].jobs for number in pending]
        ready = [pipes[pipe] for pipe in wait(awaited, min(left, _LOOK))]
        for number in ready or pending:
            _look(ranks[number], number, ending)
        if ending.failed() and not in_grace:
            in_grace = True
            deadline = min(deadline, time.monotonic() + GRACE)
    return ending


def explain(
    name: str, ranks: Sequence[RankProcess], ending: Ending, timeout: float | None
) -> RankError:
    """The exception for a run of `name` that was not complete."""
    pending = _pending(ranks, ending)
    stacks = stacks_of({number: ranks[number] for number in pending})
    reports = []
    for number, rank in enumerate(ranks):
        if number in stacks:
            stack = stacks[number]
            report = RankReport(number, "waiting", stack.summary, stack.frames)
        elif number in ending.dead:
            report = RankReport(number, "died", *rank.death())
        else:
            report = _answered(number, ending.answers[number])
        reports.append(report)
    return from_reports(name, reports, timeout)


def _pending(ranks: Sequence[RankProcess], ending: Ending) -> list[int]:
    known = ending.answers.keys() | ending.dead
    return [number for number in range(len(ranks)) if number not in known]


def _look(rank: RankProcess, number: int, ending: Ending) -> None:
    alive = rank.alive  # asked first: a last answer may still lie in the pipe
    try:
        if rank.jobs.poll():
            ending.answers[number] = rank.jobs.recv()
        elif not alive:
            ending.dead.add(number)
    except (EOFError, OSError):
        ending.dead.add(number)


def _answered(number: int, answer: Outcome) -> RankReport:
    if answer.kind != "raised":
        return RankReport(number, "returned")
    error = load_error(answer.error)
    return RankReport(
        number, "raised", answer.summary, answer.traceback, error, answer.at
    )
