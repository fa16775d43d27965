"""Transcripts of snippets: record them, or check that they are still true.

    python -m xtrain_docs.transcripts snippets/lc1             compares, exit status 1
    python -m xtrain_docs.transcripts --write snippets/lc1     records

A transcript is what rank 0 printed, then rank 1, and so on. Folders mean every snippet
in them.
"""

import argparse
import difflib
import sys
from pathlib import Path

from . import config


def snippets(paths: list[Path]) -> list[Path]:
    """The programs among the paths; a folder stands for all programs below it."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*.py"))
        elif path.suffix == ".py" and path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path} is neither a snippet nor a folder of them")
    return [p for p in found if not p.name.startswith("_")]


def fresh(path: Path) -> str:
    """What the snippet prints now, rank by rank."""
    from xtrain.testing import run_script

    return "".join(run_script(path))


def difference(path: Path) -> str:
    """A diff from the transcript to a fresh run; empty if they agree."""
    transcript = path.with_suffix(".out")
    old = transcript.read_text() if transcript.is_file() else ""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        fresh(path).splitlines(keepends=True),
        f"{transcript.name} (recorded)",
        f"{path.name} (fresh run)",
    )
    return "".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if a transcript is stale."""
    parser = argparse.ArgumentParser(prog="python -m xtrain_docs.transcripts")
    parser.add_argument("--write", action="store_true", help="record instead")
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    stale = 0
    for path in snippets(options.paths or [config.ROOT / "snippets"]):
        if options.write:
            path.with_suffix(".out").write_text(fresh(path))
            print(f"recorded {path.with_suffix('.out')}")
        elif text := difference(path):
            stale += 1
            print(text)
            print(f"stale: run  python -m xtrain_docs.transcripts --write {path}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
