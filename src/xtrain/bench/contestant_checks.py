"""Is every contestant right? Each is called once before anything is timed.

Its outputs must be those of the reference, or else of the first contestant, and what
its ledger counts must equal its formula, to the byte. One mistake on one rank ends the
race on all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.bench.race import Case, Contestant, Race, RaceError, Trial, synchronize
from xtrain.comm import CommLedger

Counts = dict[str, int | None]
"""Bytes of each contestant, by name."""


class Checked(NamedTuple):
    """The trials of all contestants, and the bytes of one call on this rank."""

    trials: dict[str, Trial]
    sent: Counts
    formula: Counts
    wire: Counts


def check_contestants(
    race: Race, case: Case, participants: list[Contestant]
) -> Checked:
    """Make and call every contestant; RaceError on every rank when one is wrong."""
    found = Checked({}, {}, {}, {})
    expected = race.reference(case) if race.reference else None
    for contestant in participants:
        trial = contestant.make(case)
        dist.barrier()
        with CommLedger() as ledger:
            trial.call()
            synchronize(case.device)
        for _ in range(1, race.checked_calls):
            trial.call()
        if expected is None:
            expected = [output.detach().clone() for output in trial.outputs]
        name = contestant.name
        problem = _wrong_result(trial.outputs, expected, race.tolerance)
        sent, formula, wrong_bytes = _compare_bytes(contestant, case, ledger)
        found.sent[name], found.formula[name] = sent, formula
        found.wire[name] = ledger.wire_bytes
        _refuse(f"{race.name}: {name}, {case.size} bytes", problem or wrong_bytes)
        if trial.reset is not None:
            trial.reset()
        found.trials[name] = trial
    return found


def _compare_bytes(
    contestant: Contestant, case: Case, ledger: CommLedger
) -> tuple[int | None, int | None, str | None]:
    """Bytes sent as counted, as the formula has them, and what is wrong with them.

    The count is None where only the backend knows, both are without a formula.
    """
    if contestant.traffic is None:
        return None, None, None
    exact, rank = contestant.traffic(case), dist.get_rank()
    sent, received = exact.sent[rank], exact.received[rank]
    if any(event.nbytes is None for event in ledger.events):
        return None, sent, None
    problem = _wrong_bytes("sent", ledger.bytes_sent, sent)
    problem = problem or _wrong_bytes("received", ledger.bytes_received, received)
    return ledger.bytes_sent, sent, problem


def _wrong_result(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> str | None:
    shapes = [list(t.shape) for t in outputs], [list(t.shape) for t in expected]
    if shapes[0] != shapes[1]:
        return f"leaves tensors of shapes {shapes[0]}, expected {shapes[1]}"
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if torch.equal(output, right):
            continue
        error = (output.double() - right.double()).abs()
        worst = float(error.max())
        if not worst <= tolerance:  # also when it is not a number
            wrong = int((~(error <= tolerance)).sum())
            return (
                f"output {index} differs in {wrong} of {output.numel()} elements, "
                f"by up to {worst:g}"
            )
    return None


def _wrong_bytes(what: str, counted: int, formula: int) -> str | None:
    if counted == formula:
        return None
    return f"{what} {counted} bytes, the formula gives {formula}"


def _refuse(who: str, problem: str | None) -> None:
    """Raise on every rank when any has a problem, so that none waits."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"rank {rank} {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise RaceError(f"{who}: " + "; ".join(found))
