"""The one store of evidence: what a run gave, under the digest of the code it reached.

    {"schema": 3, "about": {"backend": "gloo", ...},                 of the last run
     "entries": {
    "tests/comm/test_ring.py::test_sum[4]": {"key": "90c1...", "torch": "2.13",
      "roots": ["src/xtrain/comm/ring.py", "tests/comm/test_ring.py"], "value": ...},
    ...}}

An entry is good while its key is the digest of all files that its roots reach by
imports (`closure`), and while torch's minor version is the installed one. Results of
tests, runs of lectures, transcripts and traces differ in their values alone (`results`
describes those of tests).
"""

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from xtrain.evidence.closure import digest, steady, torch_minor

SCHEMA = 3


@dataclass(frozen=True)
class Entry:
    """What one run gave, as JSON, and the code that it reached.

    A run is on the code as it stands when its key is taken, before it starts.

    Attributes:
        roots: files below the root of the repository, with `/`.
    """

    key: str
    torch: str
    roots: tuple[str, ...]
    value: Any = None

    @classmethod
    def now(cls, roots: Iterable[Path], root: Path) -> Self:
        """For a run on the code as it stands; its value is to come."""
        names = tuple(Path(os.path.relpath(path, root)).as_posix() for path in roots)
        return cls(_key(names, root), torch_minor(), names)

    def with_value(self, value: Any) -> Self:
        """The same, with what the run gave."""
        return replace(self, value=json.loads(json.dumps(value)))

    def is_of_same(self, other: Self) -> bool:
        """Did both run on the same code and torch?"""
        return self.with_value(None) == other.with_value(None)

    def is_of(self, root: Path) -> bool:
        """Did it run on the code as it stands, with whichever torch?"""
        return self.key == _key(self.roots, root)

    def is_good(self, root: Path) -> bool:
        """Would the same run give the same?"""
        return self.torch == torch_minor() and self.is_of(root)


Entries = dict[str, Entry]


class Store:
    """The entries of one file, by name.

    Args:
        root: the repository whose code they are of.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root

    def read(self) -> Entries:
        """All entries; none when the file is missing or cannot be read."""
        return self._read()[1]

    def about(self) -> dict[str, Any]:
        """What the file tells of the last run as a whole."""
        return self._read()[0]

    def good(self) -> Entries:
        """The entries that hold for the code as it stands."""
        with steady():
            return {n: e for n, e in self.read().items() if e.is_good(self.root)}

    def put(self, entries: Entries, about: dict[str, Any] | None = None) -> None:
        """Add entries and drop what is old; several processes may do so at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.parent / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write(self.good() | entries, self.about() if about is None else about)

    def write(self, entries: Entries, about: dict[str, Any] | None = None) -> None:
        """Write the file, whole or not at all, with one line an entry."""
        head = json.dumps({"schema": SCHEMA, "about": about or {}}).removesuffix("}")
        lines = [
            f"{json.dumps(name)}: {json.dumps(asdict(entry), separators=(',', ':'))}"
            for name, entry in sorted(entries.items())
        ]
        text = f'{head}, "entries": {{\n' + ",\n".join(lines) + "\n}}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, self.path)

    def _read(self) -> tuple[dict[str, Any], Entries]:
        if not self.path.is_file():
            return {}, {}
        status = self.path.stat()
        changed = (status.st_mtime_ns, status.st_ino, status.st_size)
        return _read(self.path, changed)


def _key(names: Iterable[str], root: Path) -> str:
    return digest([root / name for name in names], (root / "src", root))


@lru_cache(maxsize=128)
def _read(path: Path, changed: tuple[int, ...]) -> tuple[dict[str, Any], Entries]:
    """What a file tells of the run, and its entries."""
    del changed  # part of the key: a changed file is read again
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = {}
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return {}, {}
    return content["about"], {
        name: Entry(e["key"], e["torch"], tuple(e["roots"]), e["value"])
        for name, e in content["entries"].items()
    }
