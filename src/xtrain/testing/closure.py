"""What an outcome depends on: a file, and all files of ours that it reaches by imports.

    tests/comm/test_ring.py -> tests/comm/reference.py
                            -> xtrain/__init__.py
                            -> xtrain/comm/__init__.py -> xtrain/comm/ring.py -> ...

Evidence (a test's result, a transcript, a recorded run) is good for as long as none of
these files changes. The list is computed from the import statements, wherever in a file
they stand, so nobody keeps it by hand. What is imported by a name made at run time is
not seen: hand its file over as a further root.

Standard library only, and nothing is imported to find out.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

Folders = tuple[Path, ...]


def closure(roots: Iterable[Path], folders: Folders) -> list[Path]:
    """`roots` and every file under `folders` that they reach by imports, sorted.

    Args:
        folders: where modules are looked for, as in sys.path. What is found in none of
            them (torch, the standard library) is not followed.
    """
    found: set[Path] = set()
    waiting = [Path(root) for root in roots]
    while waiting:
        file = waiting.pop()
        if file not in found and file.is_file():
            found.add(file)
            waiting += _reached(file, file.stat().st_mtime_ns, folders)
    return sorted(found)


def stamp(roots: Iterable[Path], folders: Folders, *more: str) -> str:
    """A digest of the closure's contents and of `more`: 16 hexadecimal digits.

    A file enters with its path below its folder, so another checkout has the same.
    """
    total = hashlib.sha256("\0".join(more).encode())
    for file in closure(roots, folders):
        total.update(f"\0{_name(file, folders)}\0".encode())
        total.update(_digest(file, file.stat().st_mtime_ns))
    return total.hexdigest()[:16]


def torch_minor() -> str:
    """The installed torch as "2.13", without importing it."""
    return ".".join(version("torch").split(".")[:2])


def imports(file: Path, package: str) -> Iterator[str]:
    """Every module that a file may import, as dotted names.

    `from a import b` yields a.b as well: b may be a module. Relative imports are
    resolved against `package`, the file's own.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if node.level else []
            parents = parents[: len(parents) - node.level + 1]
            base = ".".join([*parents, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@lru_cache(maxsize=4096)
def _reached(file: Path, changed: int, folders: Folders) -> tuple[Path, ...]:
    """The files that one file's imports lead to; `changed` makes an edit a new key."""
    del changed
    found = dict.fromkeys(_packages_above(file, folders))
    for name in imports(file, _package(file, folders)):
        parts = name.split(".")
        for folder in folders:
            # Importing a.b.c runs a/__init__.py and a/b/__init__.py first.
            for depth in range(1, len(parts) + 1):
                base = folder.joinpath(*parts[:depth])
                found |= dict.fromkeys([base / "__init__.py", base.with_suffix(".py")])
    return tuple(path for path in found if path.is_file())


@lru_cache(maxsize=4096)
def _digest(file: Path, changed: int) -> bytes:
    del changed  # part of the key, as above
    return hashlib.sha256(file.read_bytes()).digest()


def _package(file: Path, folders: Folders) -> str:
    for folder in folders:
        if file.is_relative_to(folder):
            return ".".join(file.relative_to(folder).parts[:-1])
    return ""


def _packages_above(file: Path, folders: Folders) -> list[Path]:
    """The `__init__.py` of the packages that hold a file."""
    above = []
    for parent in file.parents:
        if parent in folders or not (parent / "__init__.py").is_file():
            break
        above.append(parent / "__init__.py")
    return above


def _name(file: Path, folders: Folders) -> str:
    for folder in folders:
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    return file.name
