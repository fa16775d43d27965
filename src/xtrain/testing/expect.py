"""Assert that a call fails on every rank, the way bad input must."""

import re
from collections.abc import Callable
from typing import Any, Literal

from xtrain.testing.errors import RankError
from xtrain.testing.world import World


def expect_error(
    world: World,
    fn: Callable[..., Any],
    *args: Any,
    error: type[BaseException] | tuple[type[BaseException], ...] = ValueError,
    match: str = "",
    timeout: float | Literal["default"] = "default",
) -> list[BaseException]:
    """Run `fn(*args)`; return the exceptions in rank order.

    AssertionError unless every rank raised `error` with a message in which the
    regular expression `match` is found. One rank that raises while the others wait
    is the bug this looks for: a mistake must not become a hang.
    """
    try:
        world.run(fn, *args, timeout=timeout)
    except RankError as caught:
        wrong = [
            report.line()
            for report in caught.reports
            if not isinstance(report.exception, error)
            or not re.search(match, report.summary)
        ]
        if not wrong:
            return [r.exception for r in caught.reports if r.exception is not None]
        raise AssertionError(
            f"expected {error} matching {match!r} on every rank, but\n  "
            + "\n  ".join(wrong)
        ) from caught
    raise AssertionError(f"expected {error} on every rank, but all returned")
