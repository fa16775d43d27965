"""What an outcome depends on: a file, and all files of ours that it reaches by imports.

    tests/comm/test_ring.py -> tests/conftest.py
                            -> tests/comm/reference.py
                            -> xtrain/comm/__init__.py -> xtrain/comm/ring.py -> ...

Evidence (a test's result, a transcript, a recorded run) is good for as long as none of
these files changes. The list is computed from the import statements, wherever in a file
they stand. What is imported by a name made at run time is not seen: hand its file over
as a further root.

Standard library only, and nothing is imported to find out.
"""

import ast
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

Folders = tuple[Path, ...]
_seen: ContextVar[dict[Any, Any] | None] = ContextVar("seen", default=None)


@contextmanager
def steady() -> Iterator[None]:
    """Look at each file once within: for a pass over many outcomes."""
    known = _seen.get()
    token = _seen.set({} if known is None else known)
    try:
        yield
    finally:
        _seen.reset(token)


def closure(roots: Iterable[Path], folders: Folders) -> list[Path]:
    """`roots` and every file under `folders` that they reach by imports, sorted.

    Args:
        folders: where modules are looked for, as in sys.path. What is found in none of
            them (torch, the standard library) is not followed.
    """
    return sorted(_parts(roots, folders))


def digest(roots: Iterable[Path], folders: Folders) -> str:
    """A digest of the closure's contents: 16 hexadecimal digits.

    A file enters with its path below its folder, so another checkout has the same.
    """
    asked, seen = (tuple(roots), folders), _seen.get()
    if seen is not None and asked in seen:
        return seen[asked]
    parts = _parts(*asked)
    total = hashlib.sha256(b"".join(parts[file] for file in sorted(parts)))
    found = total.hexdigest()[:16]
    if seen is not None:
        seen[asked] = found
    return found


def _parts(roots: Iterable[Path], folders: Folders) -> dict[Path, bytes]:
    """What each file of the closure adds to a digest."""
    found: dict[Path, bytes] = {}
    waiting = list(roots)
    while waiting:
        file = waiting.pop()
        if file not in found and (changed := _changed(file)) is not None:
            found[file], reached = _read(file, changed, folders)
            waiting += reached
    return found


@cache
def torch_minor() -> str:
    """The installed torch as "2.13", without importing it."""
    return ".".join(version("torch").split(".")[:2])


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that the text of a file may import, as dotted names.

    `from a import b` yields a.b as well: b may be a module. Relative imports are
    resolved against `package`, the file's own.
    """
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if node.level else []
            parents = parents[: len(parents) - node.level + 1]
            base = ".".join([*parents, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _changed(file: Path) -> int | None:
    """When a file last changed; None where there is none."""
    seen = _seen.get()
    if seen is not None and file in seen:
        return seen[file]
    try:
        status = os.stat(file)
        found = status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
    except OSError:
        found = None
    if seen is not None:
        seen[file] = found
    return found


@lru_cache(maxsize=4096)
def _read(file: Path, changed: int, folders: Folders) -> tuple[bytes, tuple[Path, ...]]:
    """A file's name with a digest of its content, and the files its imports lead to."""
    del changed  # part of the key: a changed file is read again
    part = f"\0{_name(file, folders)}\0".encode()
    content = file.read_bytes()
    part += hashlib.sha256(content).digest()
    if file.suffix != ".py":
        return part, ()
    reached = dict.fromkeys(_above(file, folders))
    for name in imports(content.decode(), _package(file, folders)):
        reached |= dict.fromkeys(_candidates(name, folders))
    return part, tuple(path for path in reached if _changed(path) is not None)


@lru_cache(maxsize=16384)
def _candidates(name: str, folders: Folders) -> tuple[Path, ...]:
    """Where the files may lie that importing a.b.c runs: a's and a.b's come first."""
    parts = name.split(".")
    bases = (
        folder.joinpath(*parts[:depth])
        for folder in folders
        for depth in range(1, len(parts) + 1)
    )
    return tuple(path for base in bases for path in module_files(base))


def module_files(base: Path) -> tuple[Path, Path]:
    """What the path a/b can mean: a package's a/b/__init__.py, or a module's a/b.py."""
    return base / "__init__.py", base.with_suffix(".py")


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement of a file; an import is one, and expressions are most of it."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, block, ())


def _package(file: Path, folders: Folders) -> str:
    return ".".join(Path(_name(file, folders)).parts[:-1])


def _above(file: Path, folders: Folders) -> list[Path]:
    """What runs before a file: its packages, and what pytest takes for its settings."""
    above: list[Path] = []
    for parent in file.parents:
        above += [parent / "conftest.py", parent / "__init__.py"]
        if parent in folders:
            return above[:-1]
    return []


def _name(file: Path, folders: Folders) -> str:
    for folder in folders:
        if file.is_relative_to(folder):
            return file.relative_to(folder).as_posix()
    return file.name
