"""Transcripts of snippets: record them, or check that they are still true.

    python -m xtrain_docs.transcripts snippets/lc1             compares, exit status 1
    python -m xtrain_docs.transcripts --write snippets/lc1     records


A transcript is what rank 0 printed, then rank 1, and so on. Folders mean every snippet
in them. A build compares those on its pages: it remembers which held, and runs a
snippet again only after a change to it, to its transcript, or to code that it reaches.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from . import config, kept


class StaleTranscriptError(ValueError):
    """A page shows output that a fresh run does not print. Stops the build."""


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

    if path.is_relative_to(config.ROOT):
        path = path.relative_to(config.ROOT)  # outputs may name the file as given
    with _as_from_the_root():
        return "".join(run_script(path, timeout=60))


@contextmanager
def _as_from_the_root() -> Iterator[None]:
    """Transcripts are of gloo on a CPU, started in the root of the repository."""
    before, folder = dict(os.environ), Path.cwd()
    paths = [str(config.SOURCE), *filter(None, [before.get("PYTHONPATH")])]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if (config.ROOT / "snippets").is_dir():
        os.chdir(config.ROOT)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


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


def embedded() -> list[Path]:
    """The snippets whose output some page shows."""
    from .authored import references

    names = {name for name in references() if name.endswith(".out")}
    return [(config.ROOT / name).with_suffix(".py") for name in sorted(names)]


def require_embedded() -> None:
    """StaleTranscriptError unless those on pages hold; runs what may have changed."""
    problems = []
    for path in embedded():
        name = path.relative_to(config.ROOT).as_posix()
        roots = [path, path.with_suffix(".out")]
        try:
            kept.remembered(
                "transcripts", name, roots, partial(hold, path), f"run: {name}"
            )
        except StaleTranscriptError as problem:
            problems.append(str(problem))
    if problems:
        raise StaleTranscriptError("\n\n".join(problems))


def hold(path: Path) -> bool:
    """True when a fresh run prints the transcript; StaleTranscriptError if not."""
    if text := difference(path):
        name = path.relative_to(config.ROOT).as_posix()
        command = f"python -m xtrain_docs.transcripts --write {name}"
        raise StaleTranscriptError(f"{text}\n{name}: stale transcript. Run: {command}")
    return True


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
