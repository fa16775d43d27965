"""What real runs produced, kept from one build to the next.

    docs/data/kept/SHELF.json    committed: what the pages of this code need
    build/kept/SHELF.json        what had to be run here, because it differs from that
    build/asked/SHELF.json       all that the last build asked for: the next committed

`make record` copies what was asked for to docs/data; a test runs all of it anew.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from xtrain.evidence.store import Entries, Entry, Store

from . import config

asked: dict[str, Entries] = {}
"""What this process has asked for, by shelf."""


def committed() -> Path:
    """The folder that travels with the code."""
    return config.ROOT / "docs" / "data" / "kept"


def local() -> Path:
    """The folder of this machine."""
    return config.BUILD / "kept"


def last_build() -> Path:
    """The folder of what the last build asked for."""
    return config.BUILD / "asked"


def shelf(path: Path) -> Store:
    """The entries of one file."""
    return Store(path, config.ROOT)


def remembered(
    on: str, name: str, roots: Iterable[Path], run: Callable[[], Any], say: str = ""
) -> Any:
    """The value kept on a shelf under `name`, or that of a run, as JSON.

    Args:
        name: says which run it is, with its arguments.
        roots: files that reach all code of the run.
        run: called, and its value kept in build/, when nothing good is there.
        say: printed before a run.
    """
    now = Entry.now(roots, config.ROOT)
    files = [shelf(folder / f"{on}.json") for folder in (committed(), local())]
    found = (file.read().get(name) for file in files)
    entry = next((e for e in found if e and e.is_of_same(now)), None)
    if entry is None:
        if say:
            print(say, flush=True)
        entry = now.with_value(run())
        files[-1].put({name: entry})
    asked.setdefault(on, {})[name] = entry
    return entry.value


def note_asked() -> None:
    """Note for `make record` what this build has asked for."""
    shutil.rmtree(last_build(), ignore_errors=True)
    last_build().mkdir(parents=True)
    for on, entries in asked.items():
        shelf(last_build() / f"{on}.json").write(entries)
