"""Files that a build writes: left alone while they would not change, none committed."""

import hashlib
from pathlib import Path


def digest(content: bytes, digits: int = 8) -> str:
    """Hexadecimal digits of the SHA-256: another content has others."""
    return hashlib.sha256(content).hexdigest()[:digits]


def write(path: Path, text: str) -> Path:
    """Write a file if its text changes."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def prune(folder: Path, kept: set[Path]) -> None:
    """Remove what a folder of such pages holds besides `kept`."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in kept:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
