"""Does a passing test prove everything that the pages embed?

    python -m xtrain_docs.stale        exit status 1, and which is not, when some is not
    python -m xtrain_docs.stale --files    prints the files of tests that must run
    python -m xtrain_docs.stale --all      prints the files of all marked tests of which
                                           no result holds, on a page or not

`make verify` asks this, and runs the tests that feed the record only where it must.
"""

import sys

from xtrain.evidence.marks import marked_tests
from xtrain.evidence.results import file_of, function_of

from . import authored, config, kept, symbols, verification

TABLES = ("xtrain_docs.matrix.training:train",)
"""Symbols whose tests tables read about, see tables/support_matrix.py."""
SHOWN = 5
"""How many unproved symbols are named; the others are counted."""


def unproved() -> dict[str, str]:
    """Each symbol on a page that no current passing test verifies, with the reason."""
    reasons = {}
    for reference in (*authored.embedded(), *TABLES):
        try:
            verification.check(symbols.resolve(reference).key)
        except verification.UnverifiedError as error:
            reasons[reference] = str(error)
        except ValueError:
            pass  # an unknown name: no test helps, and the build names it
    return reasons


def files() -> set[str]:
    """The files with tests of what is not proved."""
    keys = {symbols.resolve(reference).key for reference in unproved()}
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    return {file_of(test) for key in keys for test in marked.get(key, ())}


def all_files() -> set[str]:
    """The files of marked tests that have not run on the current code."""
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    records = [file for folder in config.RECORDS for file in folder.glob("*.json")]
    ran = {function_of(test) for file in records for test in kept.shelf(file).good()}
    return {file_of(test) for names in marked.values() for test in names - ran}


def main(arguments: list[str] | None = None) -> int:
    """Print what is not proved; 1 when something is not."""
    if arguments in (["--files"], ["--all"]):
        found = files() if arguments == ["--files"] else all_files()
        print("\n".join(sorted(found)))
        return 0
    missing = sorted(unproved())
    if not missing:
        return 0
    print("The verification record is missing or older than the code of")
    for reference in missing[:SHOWN]:
        print(f"  {reference}")
    if len(missing) > SHOWN:
        print(f"  and {len(missing) - SHOWN} more")
    print("so the tests that feed it are run now.", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
