"""Real runs behind the tables and figures of the pages.

`remembered(function, ranks)` runs a function of a lecture on real ranks and returns
what it gave on each, kept until the code it depends on changes (`kept`).
"""

import importlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from . import kept, symbols

ITEMSIZE = 4


class EvidenceError(ValueError):
    """A run contradicts a formula. Stops the build."""


def remembered(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    also: Iterable[str] = (),
) -> list[Any]:
    """`World(ranks).run(function, *arguments)`, or what it gave before, as JSON.

    It runs again when any code that the function's module reaches has changed.

    Args:
        also: modules that the function imports by a name it is given.
    """
    module = function.__module__
    asked = json.dumps([f"{module}:{function.__qualname__}", ranks, *arguments])
    return kept.remembered(
        shelf(module),
        asked,
        map(symbols.module_path, (module, *also)),
        lambda: again(asked),
        f"run: {asked}",
    )


def shelf(module: str) -> str:
    """The name of its results: xtrain_docs.lectures.lc1.ledger gives lc1_ledger."""
    return "_".join(module.split(".")[-2:])


def again(asked: str) -> list[Any]:
    """Run now what `remembered` is asked for."""
    reference, ranks, *arguments = json.loads(asked)
    module, _, name = reference.partition(":")
    function = getattr(importlib.import_module(module), name)
    return _world(ranks).run(function, *arguments, timeout=60.0)


@lru_cache(maxsize=4)
def _world(ranks: int) -> Any:
    """A pool of ranks, kept for the next run of this build."""
    from xtrain.testing import World

    return World(ranks)
