"""The fault matrix as tables: cases are counted in the list that the tests run."""

import runpy
from functools import cache
from typing import Any

from ... import config
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

CASES = config.ROOT / "tests/faults/cases.py"


@cache
def matrix() -> dict[str, Any]:
    """What the file of the cases defines."""
    return runpy.run_path(str(CASES))


@value
def fault_cases(everyday: bool = False) -> int:
    """How many cases there are, or how many of them run on every change."""
    return len(matrix()["EVERYDAY" if everyday else "CASES"])


def counted(fault: str, axis: str) -> str:
    """Cases of a fault on an axis, and in brackets those of every day."""
    every, often = (
        sum((case.fault, case.axis) == (fault, axis) for case in matrix()[name])
        for name in ("CASES", "EVERYDAY")
    )
    return f"{every} ({often})" if often else f"{every}"


@TABLES
def fault_matrix() -> Table:
    """Faults and axes: how many cases, and in brackets how many of them every day."""
    made = matrix()
    axes = [*made["AXES"], made["ALL"]]
    rows = [[fault, *(counted(fault, a) for a in axes)] for fault in made["FAULTS"]]
    return Table(["fault", *axes], rows, "l" + "r" * len(axes))


@TABLES
def fault_phases() -> Table:
    """Faults and phases: on how many layouts, and why on none."""
    made = matrix()
    phases, limits = made["PHASES"], made["COMES_IN"]
    rows = []
    for fault in made["FAULTS"]:
        found = [case.phase for case in made["CASES"] if case.fault == fault]
        counts = [f"{found.count(phase) or 'none'}" for phase in phases]
        rows.append([fault, *counts, limits.get(fault, ("", ""))[1]])
    align = "l" + "r" * len(phases) + "l"
    return Table(["fault", *phases, "why none"], rows, align)
