"""What real runs produced, kept from one build to the next.

    docs/data/kept/SHELF.json    committed: what the pages of this code need
    build/kept/SHELF.json        what had to be run here, because it differs from that

    {"['ring', 4]": {"stamp": "90c1...", "result": ...}, ...}

An entry is good while its stamp is: the digest of all code that it depends on, computed
from imports, and of torch's minor version (`xtrain.testing.closure`). `make record`
moves what is new from build/ to docs/data; a test runs all of it anew.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from xtrain.testing import closure

from . import config

Shelf = dict[str, dict[str, Any]]
USED = "used.txt"  # no shelf: it must not end in .json
used: dict[str, dict[str, str]] = {}
"""What this process has asked for, by shelf, with the stamps: what a build needs."""


def committed() -> Path:
    """The folder that travels with the code."""
    return config.ROOT / "docs" / "data" / "kept"


def local() -> Path:
    """The folder of this machine."""
    return config.BUILD / "kept"


def stamp(roots: Iterable[Path]) -> str:
    """Changes whenever something that the roots run could have changed."""
    folders = (config.SOURCE, config.ROOT)
    return closure.stamp(roots, folders, closure.torch_minor())


def remembered(
    shelf: str, asked: str, now: str, run: Callable[[], Any], say: str = ""
) -> Any:
    """The result kept for `asked` under the stamp `now`, or that of a run, as JSON.

    Args:
        asked: names the run and its arguments.
        run: called, and its result kept in build/, when nothing good is there.
        say: printed before a run.
    """
    used.setdefault(shelf, {})[asked] = now
    if entry := find(shelf, asked, now):
        return entry["result"]
    if say:
        print(say, flush=True)
    result = json.loads(json.dumps(run()))
    put(local() / f"{shelf}.json", {asked: {"stamp": now, "result": result}})
    return result


def find(shelf: str, asked: str, now: str) -> dict[str, Any] | None:
    """The entry with this stamp, committed or of this machine."""
    for folder in (committed(), local()):
        entry = read(folder / f"{shelf}.json").get(asked)
        if entry is not None and entry["stamp"] == now:
            return entry
    return None


def note_used() -> None:
    """Leave word for `make record` of what this build has asked for."""
    local().mkdir(parents=True, exist_ok=True)
    (local() / USED).write_text(json.dumps(used, indent=1), encoding="utf-8")


def read(path: Path) -> Shelf:
    """The entries of a file; none when there is no file."""
    return _read(path, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> Shelf:
    del changed  # part of the key: a changed file is read again
    return json.loads(path.read_text(encoding="utf-8"))


def put(path: Path, entries: Shelf) -> None:
    """Add entries to a file, whole or not at all; several processes may do so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write(path, old | entries)


def write(path: Path, entries: Shelf) -> None:
    """Write a file with one line an entry, so that a change shows as one."""
    lines = [
        f"{json.dumps(asked)}: {json.dumps(entries[asked], separators=(',', ':'))}"
        for asked in sorted(entries)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(fresh, path)
