"""What a size or a rate has to be."""

import math


def require_positive(name: str, value: object) -> None:
    """ValueError unless `value` is a finite number above zero."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is not a finite number above 0")


def require_whole(name: str, value: object, least: int = 1) -> None:
    """ValueError unless `value` is an int, and not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not an int of at least {least}")
