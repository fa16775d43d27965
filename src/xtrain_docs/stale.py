"""Is everything that the pages embed proved as it stands?

    python -m xtrain_docs.stale        exit status 1, and which is not, when some is not

`make verify` asks this, and runs the tests that feed the record only when it must.
"""

import sys

from . import authored, symbols, verification

SHOWN = 5
"""How many unproved symbols are named; the others are counted."""


def unproved() -> dict[str, str]:
    """Each embedded symbol that no current passing test verifies, with the reason."""
    reasons = {}
    for reference in authored.embedded():
        try:
            verification.check(symbols.resolve(reference).key)
        except verification.UnverifiedError as error:
            reasons[reference] = str(error)
        except ValueError:
            pass  # an unknown name: no test helps, and the build says what is wrong
    return reasons


def main() -> int:
    """Print what is not proved; 1 when something is not."""
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
    sys.exit(main())
