"""What tables and figures of all lectures share: sizes of the runs, a word for a
contradiction, and how counted bytes are written.
"""

from collections.abc import Sequence

WORLD_SIZES = (2, 3, 4, 8)
HARD_SPACE = "\u00a0"
"""A space at which no line is broken."""
PHI = "\u03a6"
"""The size of the model: all of its parameters, in bytes or in elements."""


class EvidenceError(ValueError):
    """A run contradicts a formula. Stops the build."""


def count(number: float) -> str:
    """73728 as `73 728`."""
    return f"{int(number):,}".replace(",", HARD_SPACE)


def in_units(number: float, unit: str) -> str:
    """1.5 as `1.5 M`; at most three digits behind the dot."""
    return f"{number:.3f}".rstrip("0").rstrip(".") + HARD_SPACE + unit


def average_in_units(counted: Sequence[int | None], size: int, unit: str) -> str:
    """The bytes of an average rank as a multiple of `size`, where they are counted."""
    known = [number for number in counted if number is not None]
    if len(known) < len(counted):
        return "not counted here"
    return in_units(sum(known) / len(known) / size, unit)
