"""Files that a build writes, left alone while they would not change, or reads again.

None of those that it writes is committed.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

Read = TypeVar("Read")


def digest(content: bytes, digits: int = 8) -> str:
    """Hexadecimal digits of the SHA-256: another content has others."""
    return hashlib.sha256(content).hexdigest()[:digits]


def kept_by_file(read: Callable[[Path], Read]) -> Callable[[Path], Read]:
    """Keep what a function reads of a file, for as long as the file stays as it is."""
    kept = lru_cache(maxsize=4096)(lambda path, changed: read(path))
    return lambda path: kept(path, path.stat().st_mtime_ns)


def write(path: Path, text: str) -> Path:
    """Write a file if its text changes."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def head(title: str, description: str, searched: bool = True) -> list[str]:
    """The first lines of such a page."""
    return [
        "---",
        f'title: "{title}"',
        f"description: {description}",
        "generated: true",
        *([] if searched else ["search: {exclude: true}"]),
        "---",
        "",
        f"# {title}",
        "",
    ]


def prune(folder: Path, kept: set[Path]) -> None:
    """Remove what a folder of such pages holds besides `kept`."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in kept:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
