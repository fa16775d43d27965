"""The verification record: which tests passed on which version of which symbol.

    build/verification/gloo-cpu.json
    {"schema": 1, "created": ..., "torch": ..., "python": ..., "platform": ...,
     "backend": "gloo", "device": "cpu",
     "symbols": {"xtrain.comm.ring:ring_all_reduce": {
        "digest": sha256 of the symbol's source,
        "tests": [{"id", "outcome", "world_sizes", "seconds"}]}}}

A run adds what it saw to what earlier runs saw, so running one test does not forget
the others; a symbol whose source changed starts empty. Command line:

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
from pathlib import Path
from typing import Any

from xtrain.testing.marks import Marked, marked_tests
from xtrain.testing.source import digest

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """One test that ran: what it verifies (symbol -> digest) and how it ended."""

    id: str
    outcome: str
    verifies: dict[str, str]
    world_sizes: list[int]
    seconds: float


def merge(
    old: Record, head: Record, results: Iterable[Result], marked: Marked
) -> Record:
    """The record after a run with `results`.

    Earlier results stay when the symbol's source is the same and the test still
    exists with its mark (`marked`).
    """
    results = list(results)
    symbols: dict[str, Any] = {}
    for symbol, entry in old.get("symbols", {}).items():
        kept = [
            test
            for test in entry["tests"]
            if _base(test["id"]) in marked.get(symbol, ())
        ]
        if kept and _digest(symbol) == entry["digest"]:
            symbols[symbol] = {"digest": entry["digest"], "tests": kept}
    for result in results:
        test = {
            "id": result.id,
            "outcome": result.outcome,
            "world_sizes": result.world_sizes,
            "seconds": round(result.seconds, 4),
        }
        for symbol, sha in result.verifies.items():
            entry = symbols.get(symbol)
            if entry is None or entry["digest"] != sha:
                entry = symbols[symbol] = {"digest": sha, "tests": []}
            entry["tests"] = [t for t in entry["tests"] if t["id"] != result.id]
            entry["tests"].append(test)
    for entry in symbols.values():
        entry["tests"].sort(key=lambda test: test["id"])
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "schema": 1,
        "created": created,
        **head,
        "symbols": dict(sorted(symbols.items())),
    }


def update(path: Path, head: Record, results: Iterable[Result], marked: Marked) -> None:
    """Merge `results` into the file at `path`, whole or not at all.

    Two test runs may end at the same time, hence the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = merge(read(path), head, results, marked)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)


def read(path: Path) -> Record:
    """The record at `path`; an empty one when it is missing or not readable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if record.get("schema") == 1 else {}


def problems(records: Iterable[Record], marked: Marked) -> list[str]:
    """Why the records do not prove every marked symbol as it stands; empty if they do.

    A symbol is proved when each test marked with it was recorded on the current
    source, at least one passed and none failed.
    """
    records = list(records)
    found = []
    for symbol, names in sorted(marked.items()):
        now = _digest(symbol)
        if now is None:
            found.append(f"{symbol}: there is no such symbol")
            continue
        entries = [r["symbols"][symbol] for r in records if symbol in r["symbols"]]
        tests = [t for e in entries if e["digest"] == now for t in e["tests"]]
        failed = sorted({t["id"] for t in tests if t["outcome"] == "failed"})
        missing = sorted(names - {_base(t["id"]) for t in tests})
        if entries and not tests:
            found.append(f"{symbol}: its source changed since its tests ran")
        elif failed:
            found.append(f"{symbol}: {failed[0]} failed")
        elif missing:
            found.append(f"{symbol}: {missing[0]} has not run")
        elif not any(t["outcome"] == "passed" for t in tests):
            found.append(f"{symbol}: all of its tests were skipped")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code: 0 when every marked symbol is proved."""
    parser = argparse.ArgumentParser(prog="python -m xtrain.testing.record")
    parser.add_argument("--check", action="store_true", help="the default action")
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    parser.add_argument("--records", type=Path, default=Path("build/verification"))
    options = parser.parse_args(arguments)
    marked = marked_tests(options.tests.resolve(), options.tests.resolve().parent)
    records = [read(path) for path in sorted(options.records.glob("*.json"))]
    found = problems([record for record in records if record], marked)
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
