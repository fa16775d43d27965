"""The fault matrix: axis x phase x fault, which cases there are, and which run when.

    axis    data, tensor, pipeline, context, expert: 2 ranks each; all five: 16 ranks
    phase   start, data, forward, backward, optimizer, checkpoint
    fault   what happens to one rank, or to its node, when it enters the phase

EVERYDAY are the cheap cases on 2 ranks, and 30 of the others, drawn once; the scheduled
workflow runs all. The site counts these lists, without torch.
"""

import random
from collections import Counter
from itertools import count, product
from typing import NamedTuple

AXES = ("data", "tensor", "pipeline", "context", "expert")
ALL = "all five"
PHASES = ("start", "data", "forward", "backward", "optimizer", "checkpoint")
DEATHS = ("kill -9", "SIGSTOP", "exception")
"""One rank is gone, and the others have to end."""
STOPS = ("SIGTERM", "SIGTERM twice")
"""One rank is asked to end, and all save before they do."""
DISK, NAN, SLOW = "disk full", "NaN", "5 times slower"
CUT, SLOW_NETWORK = "nodes cut apart", "slow network"
FAULTS = (*DEATHS, *STOPS, DISK, NAN, SLOW, CUT, SLOW_NETWORK)
SEED = 35


class Case(NamedTuple):
    """The rank that is hit is the last one, for "disk full" the first."""

    axis: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return "-".join(self).replace(" ", "-")


COMES_IN = {
    DISK: (("checkpoint",), "the step writes no file in this phase"),
    NAN: (("forward", "backward", "optimizer"), "nothing is computed in this phase"),
    SLOW: (
        ("data", "forward", "backward", "optimizer"),
        "only seconds of steps are compared",
    ),
    SLOW_NETWORK: (("data",), "it stays slow in all phases that follow"),
}
"""The phases of a fault that has not all of them, and why it has no others."""
CASES = [
    Case(axis, phase, fault)
    for axis, phase, fault in product((*AXES, ALL), PHASES, FAULTS)
    if phase in COMES_IN.get(fault, (PHASES,))[0]
]


def drawn(number: int = 30, least: int = 3) -> list[Case]:
    """A draw in which every axis, phase and fault comes at least so often."""
    faults = (*DEATHS, *STOPS, DISK)
    cases = [c for c in CASES if c.axis != ALL and c.fault in faults]
    names = [name for names in (AXES, PHASES, faults) for name in names]
    for seed in count(SEED):
        found = random.Random(seed).sample(cases, number)
        often = Counter(value for case in found for value in case)
        if all(often[name] >= least for name in names):
            return sorted(found, key=cases.index)
    raise AssertionError


CHEAP = [
    case
    for case in CASES
    if case.axis != ALL
    and (case.fault == NAN or (case.fault, case.phase) == (SLOW, "forward"))
]
EVERYDAY = [*drawn(), *CHEAP]
