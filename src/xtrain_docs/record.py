"""The evidence that travels with the code: docs/data/kept and docs/data/verification.

    python -m xtrain_docs.record            take over what tests and build produced here
    python -m xtrain_docs.record --check    exit status 1 if what is committed is not
                                            what this code gives

Both look at the last build (what it asked for) and the last test run. `make record`
runs them first, as far as something differs from what is committed; CI runs everything
and then checks, so a record of other code cannot land.
"""

import argparse
import sys
from collections.abc import Iterator

from xtrain.evidence import results
from xtrain.evidence.marks import marked_tests
from xtrain.evidence.store import Entries, Entry, Store

from . import config, kept

NAME = "gloo-cpu.json"
"""The record of the tests that run everywhere; others come from machines with GPUs."""


def records() -> tuple[Store, Store]:
    """Of the tests: what is committed, and what ran here."""
    here = config.BUILD / results.FOLDER
    return kept.shelf(config.COMMITTED_RECORDS / NAME), kept.shelf(here / NAME)


def shelves() -> Iterator[tuple[Store, Store]]:
    """Of the pages' runs: what is committed, and what the last build asked for."""
    if not kept.last_build().is_dir():
        raise SystemExit("no build has been here yet: run make build")
    folders = kept.committed(), kept.last_build()
    for name in sorted({file.name for each in folders for file in each.glob("*.json")}):
        yield kept.shelf(folders[0] / name), kept.shelf(folders[1] / name)


def take_over() -> list[str]:
    """Make docs/data hold what the last build and test run had; what changed."""
    changed = []
    for committed, asked in shelves():
        if (entries := asked.read()) == committed.read():
            continue
        name = committed.path.stem
        if entries:
            committed.write(entries)
            changed.append(f"{name}: {len(entries)} results")
        else:
            committed.path.unlink()
            changed.append(f"{name}: no page needs it")
    committed, here = records()
    entries = merged(committed.read(), here.good())
    if entries != committed.read():
        committed.write(entries, here.about() or committed.about())
        changed.append(f"verification: {len(entries)} tests")
    return changed


def merged(old: Entries, new: Entries) -> Entries:
    """What both tell, the new where they differ in more than the time it took.

    So a second run changes nothing. What is old proves nothing, but its seconds choose
    the tests of the quick tier, so it stays for as long as its test is there.
    """

    def lasting(entry: Entry) -> Entry:
        return entry.with_value({**entry.value, "seconds": 0})

    old = {n: e for n, e in old.items() if n in new or is_there(n)}
    return old | {
        name: entry
        for name, entry in new.items()
        if name not in old or lasting(entry) != lasting(old[name])
    }


def is_there(test: str) -> bool:
    """Whether its file is there and defines it."""
    file, _, name = results.function_of(test).partition("::")
    path = config.ROOT / file
    return path.is_file() and f"\ndef {name}(" in path.read_text(encoding="utf-8")


def unproved() -> list[str]:
    """Symbols that some record knows and one does not prove, here and committed.

    Which of several tests happens to fill a cache that they share changes from run to
    run, so tests are not compared one by one.
    """
    committed, here = records()
    if not here.about():
        raise SystemExit("no tests have run here yet: run make test")
    sides = {"here": here, "committed": committed}
    good = {where: results.by_symbol(store.good()) for where, store in sides.items()}
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    old = results.by_symbol(committed.read()).keys() & marked  # a name may be gone
    known = {*results.by_symbol(here.read()), *good["committed"], *old}
    found = []
    for symbol in sorted(known):
        for where in sides:
            ended = {test.outcome: test.id for test in good[where].get(symbol, ())}
            if "failed" in ended:
                found.append(f"{symbol}, {where}: {ended['failed']} failed")
            elif "passed" not in ended:
                found.append(f"{symbol}, {where}: no passing test on its current code")
    return found


def differences() -> list[str]:
    """Where the committed evidence is not what tests and build gave here."""
    found = []
    for committed, asked in shelves():
        name, needed, good = committed.path.stem, asked.read(), committed.good()
        found += [f"{name}: {n} is missing or old" for n in needed if n not in good]
        unasked = committed.read().keys() - needed.keys()
        found += [f"{name}: {n} is not needed" for n in sorted(unasked)]
    return found + unproved()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.record")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        print("\n".join(take_over()) or "what is committed is of this code")
        return 0
    found = differences()
    for line in found[:20]:
        print(line)
    if found:
        print(f"{len(found)} differences: run make record and commit docs/data")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
