# mypy: disable-error-code="attr-defined"
"""Ranks of a case in a page, by replay.

    replay_ranks      ranks that are run in turn, each again from its start
    replay_attempts   one rank: an attempt, and the calls that it finds again
    replay_calls      sends and receives, and parts of collectives, as they are matched
    replay_kept       calls of the reader's function that need not be made again

Here is what `running` has of the virtual cluster otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch.distributed import ENGINE

from xtrain.practice.outcomes import FILE
from xtrain.practice.replay_ranks import Ranks, limited
from xtrain.practice.stopping import Printed, watch

LIMIT = 2.0
"""Seconds that a rank may run without a call."""


def on_ranks(size: int, program: Callable[..., Any], *args: Any) -> None:
    """Run `program(*args)` on so many ranks."""
    Ranks(size, LIMIT).run(program, *args)


def now() -> float:
    """The virtual clock of the rank that runs."""
    return float(ENGINE[-1].current.clock)


def advance(seconds: float) -> None:
    """Let the rank that runs compute for virtual seconds."""
    ENGINE[-1].current.clock += seconds


def prepared(source: str) -> CodeType:
    """A file's code, whose endless loops end."""
    code = compile(source, FILE, "exec")
    watch(code)
    return code


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Of a check without ranks: it ends, too."""
    with limited(2 * LIMIT, Printed(), "the file ran for"):
        yield
