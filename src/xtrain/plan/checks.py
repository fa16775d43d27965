"""Checks of sizes and rates."""

import math
from collections.abc import Collection

LARGEST = 2**63 - 1  # above it a product of sizes is no longer a float


def require_positive(name: str, value: object) -> None:
    """ValueError unless `value` is a finite number above zero."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={shown(value)} is not a finite number above 0")


def require_whole(name: str, value: object, least: int = 1) -> None:
    """ValueError unless `value` is an int, and not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={shown(value)} is not an int of at least {least}")
    if value > LARGEST:
        raise ValueError(f"{name}={shown(value)} is above 2^63 - 1, the largest size")


def require_share(name: str, value: object) -> None:
    """ValueError unless `value` is above 0 and at most 1."""
    require_positive(name, value)
    if value > 1:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is above 1: it is a share of the peak")


def require_one_of(name: str, value: object, known: Collection[object]) -> None:
    """ValueError unless `value` is among `known`."""
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ValueError(f"{name}={shown(value)} is not one of {listed}")


def shown(value: object, most: int = 40) -> str:
    """Its repr in at most `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = "an int of thousands of digits"
    return text if len(text) <= most else text[: most - 3] + "..."
