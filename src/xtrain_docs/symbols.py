"""Find a symbol's source by dotted name, without importing its module."""

import ast
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import griffe

from . import config


class SymbolError(ValueError):
    """A page names something that is not there. Stops the build."""


@dataclass(frozen=True)
class Symbol:
    """The source of `module:name`: lines `first` to `last` (from 1) of `path`."""

    module: str
    name: str
    path: str
    first: int
    last: int
    source: str
    docstring: tuple[int, int] | None

    @property
    def dotted(self) -> str:
        """`package.module.name`."""
        return f"{self.module}.{self.name}"

    @property
    def entry(self) -> str:
        """The identifier of its reference entry: a method that says nothing of itself
        has none, and its class's stands for it."""
        if self.docstring or "." not in self.name:
            return self.dotted
        return self.dotted.rpartition(".")[0]

    @property
    def key(self) -> str:
        """`module:name` of the top-level definition: what tests verify."""
        return f"{self.module}:{self.name.split('.')[0]}"


def digest(lines: str) -> str:
    """sha256 of source lines as they stand, without the last newline."""
    return hashlib.sha256(lines.rstrip("\n").encode()).hexdigest()


def module_path(module: str, root: Path) -> Path:
    """The file of a dotted module below `root`, or SymbolError."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise SymbolError(f"no module {module!r} below {root.name}/")


@lru_cache(maxsize=256)
def _load(module: str, root: Path, stamp: int) -> griffe.Module:
    del stamp  # part of the cache key: a changed file is read again
    path = module_path(module, root)
    return griffe.visit(module, filepath=path, code=path.read_text())


@lru_cache(maxsize=512)
def _text(path: Path, stamp: int) -> str:
    del stamp
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=512)
def _tree(path: Path, stamp: int) -> ast.Module:
    return ast.parse(_text(path, stamp))


def load_module(module: str, root: Path | None = None) -> griffe.Module:
    """The module as griffe reads it; nothing is imported."""
    root = root or config.SOURCE
    return _load(module, root, module_path(module, root).stat().st_mtime_ns)


def own_names(module: griffe.Module) -> list[str]:
    """Names a module defines itself, in order."""
    return [
        name
        for name, member in module.members.items()
        if not member.is_alias and not member.is_module
    ]


def resolve(reference: str, root: Path | None = None) -> Symbol:
    """Find `package.module:name` or `package.module:Class.method`.

    Raises:
        SymbolError: no such module or name, or the name is imported there from
            elsewhere (then the message says where it is defined).
    """
    root = root or config.SOURCE
    module_name, colon, name = reference.partition(":")
    if not colon or not name or not module_name:
        raise SymbolError(f"{reference!r} is not of the form package.module:name")
    module = load_module(module_name, root)
    found: griffe.Object | griffe.Alias = module
    for part in name.split("."):
        if part not in found.members:
            known = own_names(module) if found is module else list(found.members)
            raise SymbolError(
                f"{reference}: {found.path} has no {part!r}; "
                f"it has: {', '.join(known) or 'nothing'}"
            )
        found = found.members[part]
        if found.is_alias:
            home = found.target_path  # type: ignore[union-attr]
            raise SymbolError(
                f"{reference} is imported there, not defined: "
                f"write {':'.join(home.rsplit('.', 1))!r}"
            )
    path = module_path(module_name, root)
    first, last, docstring = _lines(path, name)
    lines = _text(path, path.stat().st_mtime_ns).splitlines()
    return Symbol(
        module_name,
        name,
        path.relative_to(root.parent).as_posix(),
        first,
        last,
        "\n".join(lines[first - 1 : last]),
        docstring,
    )


def _lines(path: Path, name: str) -> tuple[int, int, tuple[int, int] | None]:
    body = _tree(path, path.stat().st_mtime_ns).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in body if part in _defined(n)), None)
        if node is None:
            raise SymbolError(f"{name} is not a plain definition in {path}")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    docstring = None
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        head = node.body[0]
        if ast.get_docstring(node) is not None and head.end_lineno:
            docstring = (head.lineno, head.end_lineno)
    return first, node.end_lineno, docstring


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [t.id for t in node.targets if isinstance(t, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def form_key(reference: str) -> str | None:
    """The symbol of a whiteboard form's file, which is named as its file is.

    src/xtrain/whiteboard/comm/ring_all_reduce.py
    -> xtrain.whiteboard.comm.ring_all_reduce:ring_all_reduce; None for other files.
    A class is named so without the underscores: zero_1.py has Zero1.
    """
    if not reference.startswith("src/xtrain/whiteboard/"):
        return None
    parts = PurePosixPath(reference).with_suffix("").parts[1:]
    path, name = config.ROOT / reference, parts[-1]
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.ClassDef) and node.name.lower() == name.replace(
            "_", ""
        ):
            name = node.name
    return f"{'.'.join(parts)}:{name}"


def key_digest(key: str, root: Path | None = None) -> str:
    """The digest of the current source of `module:name`."""
    return digest(resolve(key, root).source)
