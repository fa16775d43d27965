"""Is everything that the pages embed proved as it stands?

    python -m xtrain_docs.stale        exit status 1, and which is not, when some is not
    python -m xtrain_docs.stale --files    prints the files of tests that must run
    python -m xtrain_docs.stale --all      prints the files of all marked tests of which
                                           no result holds, on a page or not

`make verify` asks this, and runs the tests that feed the record only where it must.
"""

import sys

from xtrain.testing.closure import torch_minor
from xtrain.testing.marks import marked_tests

from . import authored, config, symbols, verification

TABLES = ("xtrain_docs.matrix.training:train",)
"""Symbols whose tests tables read about, see tables/support_matrix.py."""
SHOWN = 5
"""How many unproved symbols are named; the others are counted."""


def unproved() -> dict[str, str]:
    """Each symbol on a page that no current passing test verifies, with the reason."""
    reasons = {}
    for reference in (*authored.embedded(), *TABLES):
        try:
            summary = verification.check(symbols.resolve(reference).key)
            tried = {minor(e.torch) for e in summary.current if e.passed}
            if torch_minor() not in tried:
                reasons[reference] = f"not tested on torch {torch_minor()}"
        except verification.UnverifiedError as error:
            reasons[reference] = str(error)
        except ValueError:
            pass  # an unknown name: no test helps, and the build says what is wrong
    return reasons


def minor(torch: str) -> str:
    """2.13.0+cpu as 2.13."""
    return ".".join(torch.split(".")[:2])


def files() -> list[str]:
    """The files with tests of what is not proved."""
    keys = {symbols.resolve(reference).key for reference in unproved()}
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    tests = (test for key in keys for test in marked.get(key, ()))
    return sorted({test.partition("::")[0] for test in tests})


def all_files() -> list[str]:
    """The files of marked tests that have not run on the code as it stands."""
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    ledger = verification.ledger()
    found = set()
    for key, names in marked.items():
        summary = ledger.summary_or_none(key)
        current = summary.current if summary else []
        here = [e for e in current if minor(e.torch) == torch_minor()]
        ran = {test["id"].partition("[")[0] for e in here for test in e.tests}
        found |= {name.partition("::")[0] for name in names - ran}
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    """Print what is not proved; 1 when something is not."""
    if arguments == ["--files"]:
        print("\n".join(files()))
        return 0
    if arguments == ["--all"]:
        print("\n".join(all_files()))
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
