"""Check the pages, then write the generated parts of the site.

    python -m xtrain_docs.prebuild

Generated pages are the ledger and those under docs/en/reference; they are not
committed. Files that would not change are left alone.
"""

from . import config, fonts, transcripts
from .authored import require_no_typed_code
from .ledger_page import write_ledger
from .reference_pages import write_reference


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def main() -> None:
    """Check the pages, then write everything, saying what."""
    if not config.draft():
        require_no_typed_code()
        transcripts.require_embedded()
        say("transcripts: as fresh runs print them")
    say(f"fonts: {fonts.write_fonts()} faces")
    say(f"reference pages: {write_reference()}")
    say(f"ledger: {write_ledger()} symbols")


if __name__ == "__main__":
    main()
