"""Results of tests, as entries of a store: the name is the test's id, the value

    {"outcome": "passed", "seconds": 0.5,
     "ran": {"xtrain.comm.ring:ring_all_reduce": [["gloo", 4]],
             "xtrain.comm.tree:tree_all_reduce": null}}

Each symbol that the test is marked with has the backends and numbers of ranks on which
the test ran it: none for its own process, null when it did not run it. A test that
passed without running a symbol is no evidence for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtrain.evidence.executed import Place
from xtrain.evidence.source import definition, locate
from xtrain.evidence.store import Entries, Entry

FOLDER = "verification"


@dataclass(frozen=True)
class Result:
    """One test's word on a symbol: how it ended, and where it ran the symbol.

    Attributes:
        places: backends and numbers of ranks, none for its own process.
        torch: the minor version, such as 2.13.
        about: of the whole test run: backend, device, created, torch, platform.
    """

    id: str
    outcome: str
    places: list[tuple[str, int]]
    torch: str
    about: dict[str, Any]

    @property
    def passed(self) -> bool:
        """It did, maybe on another torch."""
        return self.outcome == "passed"


def entry_of(test: str, symbols: Iterable[str], root: Path) -> Entry:
    """For a test about to run; ValueError if it is marked with what is not there."""
    symbols = sorted(symbols)
    for symbol in symbols:
        definition(symbol)
    modules = sorted({locate(symbol)[0] for symbol in symbols})
    return Entry.now([root / file_of(test), *modules], root)


def value_of(
    outcome: str, seconds: float, ran: dict[str, list[Place] | None]
) -> dict[str, Any]:
    """How a test ended."""
    return {"outcome": outcome, "seconds": round(seconds, 2), "ran": ran}


def by_symbol(
    entries: Entries, about: dict[str, Any] | None = None
) -> dict[str, list[Result]]:
    """Each symbol with the tests that are evidence for or against it."""
    found: dict[str, list[Result]] = {}
    for name, entry in entries.items():
        outcome = entry.value["outcome"]
        for symbol, places in entry.value["ran"].items():
            if places is not None or outcome != "passed":
                test = Result(name, outcome, places or [], entry.torch, about or {})
                found.setdefault(symbol, []).append(test)
    return found


def passes(entries: Entries) -> Entries:
    """What passed on ranks, without the symbols that another test found wrong."""
    wrong = {s for e in entries.values() if e.value["outcome"] == "failed"
             for s in e.value["ran"]}  # fmt: skip
    found: Entries = {}
    for name, entry in entries.items():
        ran = {s: p for s, p in entry.value["ran"].items() if p and s not in wrong}
        if ran and entry.value["outcome"] == "passed":
            found[name] = entry.with_value({**entry.value, "ran": ran})
    return found


def world_sizes(entries: Entries) -> list[int]:
    """The numbers of ranks that they ran on."""
    places = [p for e in entries.values() for p in e.value["ran"].values() if p]
    return sorted({size for each in places for _, size in each})


def file_of(test: str) -> str:
    """tests/a.py::test_b[4] as tests/a.py."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """tests/a.py::test_b[4] as tests/a.py::test_b."""
    return test.partition("[")[0]
