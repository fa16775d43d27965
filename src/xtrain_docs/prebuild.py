"""Check the pages, then write the generated parts of the site.

    python -m xtrain_docs.prebuild

Generated pages are the ledger and those under docs/en/reference; they are not
committed. Files that would not change are left alone.
"""

import shutil

from . import blocks, config, fences, fonts, transcripts
from .authored import pages, require_no_typed_code
from .ledger_page import write_ledger
from .reference_pages import write_reference


def record_traces() -> int:
    """Run every collective that some page animates; returns how many."""
    done = set()
    for page in pages():
        for fence in fences.fences(page.read_text().splitlines()):
            if fence.language == "trace" and fence.info not in done:
                found = blocks.parse_info(fence.info)
                assert found is not None
                blocks.registry("trace").run(found[1], found[2])
                done.add(fence.info)
    return len(done)


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def main() -> None:
    """Check the pages, then write everything, saying what."""
    if not config.draft():
        require_no_typed_code()
        transcripts.require_embedded()
        say("transcripts: as fresh runs print them")
    shutil.rmtree(config.PAGES / "source", ignore_errors=True)  # earlier builds made it
    say(f"fonts: {fonts.write_fonts()} faces")
    say(f"reference pages: {write_reference()}")
    say(f"ledger: {write_ledger()} symbols")
    say(f"traces: {record_traces()} recorded or still current")


if __name__ == "__main__":
    main()
