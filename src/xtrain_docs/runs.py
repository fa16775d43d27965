"""Real runs behind the tables and figures of the lc1 pages: what each rank sent.

`sent(name, numel, ranks)` runs one collective on real ranks under a `CommLedger`
and returns the bytes and messages of every rank and the number of rounds. Results are
kept in build/runs until the code they depend on changes.
"""

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import config

ITEMSIZE = 4
FOLDER = config.BUILD / "runs"


@lru_cache(maxsize=8)
def code_digest(module: str) -> str:
    """A digest of all code that the runs of one module of this package depend on."""
    total = hashlib.sha256()
    folders = ["comm"] if module.endswith("lc1") else ["comm", "data_parallel", "zero"]
    here = config.SOURCE / "xtrain_docs"
    paths = [here / "runs.py", here / f"{module.rpartition('.')[2]}.py"]
    for name in folders:
        paths += sorted((config.SOURCE / "xtrain" / name).rglob("*.py"))
    for path in filter(Path.is_file, paths):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def remembered(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """`World(ranks).run(function, *arguments)`, or what it gave before, as JSON.

    The file is named by the code's digest, so a change of the code runs it again.
    """
    asked = json.dumps([function.__module__, function.__qualname__, ranks, arguments])
    stamp = hashlib.sha256(
        (asked + code_digest(function.__module__)).encode()
    ).hexdigest()[:16]
    path = FOLDER / f"{function.__name__}-{ranks}-{stamp}.json"
    if not path.is_file():
        results = _world(ranks).run(function, *arguments, timeout=60.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"asked": asked, "results": results}))
    return json.loads(path.read_text())["results"]


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
