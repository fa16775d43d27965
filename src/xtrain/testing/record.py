"""The verification record: which tests passed on which version of which symbol.

    build/verification/gloo-cpu.json
    {"schema": 2, "created": ..., "torch": ..., "python": ..., "platform": ...,
     "backend": "gloo", "device": "cpu",
     "ran": {"passed": 900, ...}, "skipped": {reason: how many},      of the last run
     "symbols": {"xtrain.comm.ring:ring_all_reduce": {
        "digest": sha256 of the symbol's source,
        "tests": [{"id", "outcome", "stamp", "places", "seconds"}]}}}

A test's stamp is the digest of all code that it reaches (`closure`); "places" are the
backends and numbers of ranks on which it ran the symbol, none for its own process. A
test that passed without running the symbol has the outcome "unused": no evidence.

A run adds what it saw to what earlier runs saw, so running one test does not forget
the others; a result is forgotten when the symbol or anything the test reaches changes.
Command line:

    python -m xtrain.testing.record --check     exit code 1 when tests must run
"""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from xtrain.testing.closure import stamp, steady
from xtrain.testing.executed import Place
from xtrain.testing.marks import Marked, marked_tests
from xtrain.testing.source import digest, locate

Record = dict[str, Any]
SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Result:
    """One test that ran, how it ended, and what it says of each marked symbol.

    A proof is the symbol's digest, the test's stamp, and the places where the test ran
    the symbol; None when it did not.
    """

    id: str
    outcome: str
    proofs: dict[str, tuple[str, str, list[Place] | None]]
    seconds: float


def stamp_of(test_id: str, symbol: str, root: Path) -> str:
    """The stamp of a test's evidence for a symbol: changes with all code they reach."""
    return _stamp(_file(test_id), locate(symbol)[0], root)


def _stamp(file: str, module: Path, root: Path) -> str:
    test = root / file
    above = [folder / "conftest.py" for folder in test.parents]
    roots = [test, module, *(path for path in above if path.is_relative_to(root))]
    return stamp(roots, (root / "src", root))


def _file(test_id: str) -> str:
    return test_id.partition("::")[0]


def merge(
    old: Record, head: Record, results: Iterable[Result], marked: Marked, root: Path
) -> Record:
    """The record after a run with `results`.

    Earlier results stay while they are current and the test still has its mark
    (`marked`).
    """
    results = list(results)
    again = {result.id for result in results}
    symbols: dict[str, Any] = {}
    for symbol, tests in current(old, root).items():
        names = marked.get(symbol, ())
        kept = [t for t in tests if t["id"] not in again and _base(t["id"]) in names]
        if kept:
            symbols[symbol] = {"digest": _digest(symbol), "tests": kept}
    for result in results:
        for symbol, (sha, now, places) in result.proofs.items():
            entry = symbols.setdefault(symbol, {"digest": sha, "tests": []})
            unused = result.outcome == "passed" and places is None
            entry["tests"].append(
                {
                    "id": result.id,
                    "outcome": "unused" if unused else result.outcome,
                    "stamp": now,
                    "places": [list(place) for place in places or ()],
                    "seconds": round(result.seconds, 2),
                }
            )
    for entry in symbols.values():
        entry["tests"].sort(key=lambda test: test["id"])
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "schema": SCHEMA,
        "created": created,
        **head,
        "symbols": dict(sorted(symbols.items())),
    }


def current(record: Record, root: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of a record that hold for the code as it stands, by symbol."""
    stamp_now = cache(_stamp)  # the many tests of a file reach the same files
    found = {}
    with steady():
        for symbol, entry in record.get("symbols", {}).items():
            if entry["digest"] == _digest(symbol):
                module = locate(symbol)[0]
                found[symbol] = [
                    test
                    for test in entry["tests"]
                    if test["stamp"] == stamp_now(_file(test["id"]), module, root)
                ]
    return found


def update(
    path: Path, head: Record, results: Iterable[Result], marked: Marked, root: Path
) -> None:
    """Merge `results` into the file at `path`, whole or not at all.

    Two test runs may end at the same time, hence the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = merge(read(path), head, results, marked, root)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)


def read(path: Path) -> Record:
    """The record at `path`; an empty one when it is missing or not readable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if record.get("schema") == SCHEMA else {}


def problems(records: Iterable[Record], marked: Marked, root: Path) -> list[str]:
    """Why the records do not prove every marked symbol as it stands; empty if they do.

    A symbol is proved when each test marked with it has run on the code as it stands
    and ran the symbol, at least one passed and none failed.
    """
    records = list(records)
    good = [current(record, root) for record in records]
    found = []
    for symbol, names in sorted(marked.items()):
        if _digest(symbol) is None:
            found.append(f"{symbol}: there is no such symbol")
            continue
        tests = [test for each in good for test in each.get(symbol, ())]
        outcomes: dict[str, set[str]] = {}
        for test in tests:
            outcomes.setdefault(_base(test["id"]), set()).add(test["outcome"])
        failed = sorted({t["id"] for t in tests if t["outcome"] == "failed"})
        missing = sorted(names - outcomes.keys())
        unused = sorted(name for name in outcomes if outcomes[name] == {"unused"})
        known = any(symbol in record["symbols"] for record in records)
        if known and not tests:
            found.append(f"{symbol}: code has changed since its tests ran")
        elif failed:
            found.append(f"{symbol}: {failed[0]} failed")
        elif missing:
            found.append(f"{symbol}: {missing[0]} has not run")
        elif unused:
            found.append(f"{symbol}: {unused[0]} is marked with it and does not run it")
        elif not any(test["outcome"] == "passed" for test in tests):
            found.append(f"{symbol}: all of its tests were skipped")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code: 0 when every marked symbol is proved."""
    parser = argparse.ArgumentParser(prog="python -m xtrain.testing.record")
    parser.add_argument("--check", action="store_true", help="the default action")
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    parser.add_argument("--records", type=Path, default=Path("build/verification"))
    options = parser.parse_args(arguments)
    root = options.tests.resolve().parent
    marked = marked_tests(options.tests.resolve(), root)
    records = [read(path) for path in sorted(options.records.glob("*.json"))]
    found = problems([record for record in records if record], marked, root)
    for line in found:
        print(line)
    if not found:
        print(f"{len(marked)} symbols are verified as they stand")
    return 1 if found else 0


def _base(test_id: str) -> str:
    """The id without its parameters."""
    return test_id.partition("[")[0]


def _digest(symbol: str) -> str | None:
    try:
        return digest(symbol)
    except (ValueError, SyntaxError):
        return None


if __name__ == "__main__":
    sys.exit(main())
