"""Real runs behind the tables and figures of the lc1 pages: what each rank sent.

`sent(name, numel, ranks)` runs one collective on real ranks under a `CommLedger`
and returns the bytes and messages of every rank and the number of rounds. Results are
kept until the code they depend on changes (`kept`).
"""

import importlib
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from . import kept

ITEMSIZE = 4


def remembered(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """`World(ranks).run(function, *arguments)`, or what it gave before, as JSON.

    It runs again when any code that the function's module reaches has changed.
    """
    module = function.__module__
    asked = json.dumps([f"{module}:{function.__qualname__}", ranks, *arguments])
    return kept.remembered(
        module.rpartition(".")[2],
        asked,
        kept.stamp([kept.module_file(module)]),
        lambda: again(asked),
        f"run: {asked}",
    )


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


def sent(name: str, numel: int, ranks: int, root: int = 0) -> dict[str, Any]:
    """What the collective `name` of `xtrain.comm` sent, for a tensor of `numel`.

    `numel` counts what one rank hands in, as in `xtrain.plan.collective_traffic`.
    Returns lists by rank: sent and received (bytes), messages; and rounds.
    """
    from xtrain_docs.runs_lc1 import payload

    results = remembered(payload, ranks, name, numel, root)
    return {
        "sent": [r["sent"] for r in results],
        "received": [r["received"] for r in results],
        "messages": [r["messages"] for r in results],
        "rounds": rounds([r["events"] for r in results]),
    }


def rounds(events: list[list[list[Any]]]) -> int:
    """How many rounds the recorded events of all ranks take."""
    from xtrain.comm.ledger import Event, message_rounds

    placed = message_rounds([[Event(*event) for event in one] for one in events])
    return len(placed)


def wire(name: str, numel: int, ranks: int) -> dict[str, Any]:
    """Payload and wire bytes by rank of one call; `name` starts with xtrain. or torch.

    "wire" is None where the system does not count (everywhere but Linux).
    """
    from xtrain_docs.runs_lc1 import on_the_wire

    results = remembered(on_the_wire, ranks, name, numel)
    counted = [r["wire"] for r in results]
    return {
        "payload": [r["payload"] for r in results],
        "wire": None if None in counted else counted,
    }
