"""The evidence that travels with the code: docs/data/kept and docs/data/verification.

    python -m xtrain_docs.record            take over what tests and build produced here
    python -m xtrain_docs.record --check    exit status 1 if what is committed is not
                                            what this code gives

Both look at the last build (what it asked for) and the last test run. `make record`
runs them first, as far as something differs from what is committed; CI runs everything
and then checks, so a record of other code cannot land.
"""

import argparse
import json
import sys
from typing import Any

from xtrain.testing import record
from xtrain.testing.marks import marked_tests

from . import config, kept

NAME = "gloo-cpu.json"
"""The record of the tests that everybody can run; others come from their machines."""


def used() -> dict[str, dict[str, str]]:
    """What the last build asked for, by shelf, with the stamps; SystemExit if none."""
    path = kept.local() / kept.USED
    if not path.is_file():
        raise SystemExit("no build has been here yet: run make build")
    return json.loads(path.read_text())


def take_over() -> list[str]:
    """Make docs/data hold what the last build and test run had; what changed."""
    changed = []
    asked = used()
    for gone in kept.committed().glob("*.json"):
        if gone.stem not in asked:
            gone.unlink()
            changed.append(f"{gone.stem}: no page needs it")
    for shelf, stamps in asked.items():
        entries = {name: kept.find(shelf, name, now) for name, now in stamps.items()}
        missing = [name for name, entry in entries.items() if entry is None]
        if missing:
            raise SystemExit(f"{shelf}: {missing[0]} is not kept: run make build again")
        path = kept.committed() / f"{shelf}.json"
        if entries != kept.read(path):
            kept.write(path, entries)  # type: ignore[arg-type]
            changed.append(f"{shelf}: {len(entries)} results")
    path = config.COMMITTED_RECORDS / NAME
    old = record.read(path)
    new = merged(old, record.read(config.BUILD / "verification" / NAME))
    if new["symbols"] != old.get("symbols", {}):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text(new), encoding="utf-8")
        pairs = sum(len(entry["tests"]) for entry in new["symbols"].values())
        changed.append(f"verification: {pairs} pairs of symbol and test")
    return changed


def merged(old: record.Record, new: record.Record) -> record.Record:
    """What both have to say of the code as it stands; the new where they differ.

    Where they say the same the old stays, so that a second run changes nothing.
    """
    held, fresh = (record.current(each, config.ROOT) for each in (old, new))
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    symbols: dict[str, Any] = {}
    for symbol in sorted({*fresh, *held}):
        tests = {test["id"]: test for test in held.get(symbol, ())}
        for test in fresh.get(symbol, ()):
            if test["outcome"] == "unused":  # says nothing of the symbol
                tests.pop(test["id"], None)
            elif not same(tests.get(test["id"]), test):
                tests[test["id"]] = test
        names = marked.get(symbol, set())
        good = [t for i, t in sorted(tests.items()) if i.partition("[")[0] in names]
        if good:
            digest = (new if symbol in fresh else old)["symbols"][symbol]["digest"]
            symbols[symbol] = {"digest": digest, "tests": good}
    return {**(new or old), "symbols": symbols}


def as_text(of: record.Record) -> str:
    """A record with a line for each test, so that a change shows as one."""
    head = json.dumps({**of, "symbols": 0}, indent=1).removesuffix("0\n}")
    entries = [
        f'"{symbol}": {{"digest": "{entry["digest"]}", "tests": [\n'
        + ",\n".join(json.dumps(test) for test in entry["tests"])
        + "\n]}"
        for symbol, entry in of["symbols"].items()
    ]
    return head + "{\n" + ",\n".join(entries) + "\n}}\n"


def same(one: dict[str, Any] | None, other: dict[str, Any]) -> bool:
    """Equal but for the time it took."""
    return one is not None and {**one, "seconds": 0} == {**other, "seconds": 0}


def outcomes(of: record.Record) -> dict[str, dict[str, str]]:
    """Symbol -> test -> outcome, of a record's results for the code as it stands."""
    return {
        symbol: {test["id"]: test["outcome"] for test in tests}
        for symbol, tests in record.current(of, config.ROOT).items()
    }


def unproved() -> list[str]:
    """Symbols that one record proves and the other does not, here and committed.

    Which of several tests happens to fill a cache that they share changes from run to
    run, so tests are not compared one by one.
    """
    here = record.read(config.BUILD / "verification" / NAME)
    if not here:
        raise SystemExit("no tests have run here yet: run make test")
    sides = {
        "here": outcomes(here),
        "committed": outcomes(record.read(config.COMMITTED_RECORDS / NAME)),
    }
    found = []
    for symbol in sorted({symbol for side in sides.values() for symbol in side}):
        for where, side in sides.items():
            ended = side.get(symbol, {})
            failed = [test for test, outcome in ended.items() if outcome == "failed"]
            if failed:
                found.append(f"{symbol}, {where}: {failed[0]} failed")
            elif "passed" not in ended.values():
                found.append(f"{symbol}, {where}: no test proves it as it stands")
    return found


def differences() -> list[str]:
    """Where the committed evidence is not what tests and build gave here."""
    found = []
    for shelf, stamps in used().items():
        entries = kept.read(kept.committed() / f"{shelf}.json")
        for name, now in stamps.items():
            entry = entries.get(name)
            if entry is None or entry["stamp"] != now:
                found.append(
                    f"{shelf}: {name} {'is missing' if not entry else 'is old'}"
                )
        found += [f"{shelf}: {n} is not needed" for n in entries.keys() - stamps.keys()]
    found += unproved()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.record")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        changed = take_over()
        print("\n".join(changed) or "what is committed is of this code")
        return 0
    found = differences()
    for line in found[:20]:
        print(line)
    if found:
        print(f"{len(found)} differences: run make record and commit docs/data")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
