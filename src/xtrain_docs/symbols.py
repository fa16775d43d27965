"""Find a symbol's source by dotted name, without importing its module."""

import ast
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xtrain.evidence.source import module_file, names

from . import config
from .generated import kept_by_file


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
        """The identifier of its reference entry: a method without a docstring has
        none, so that of its class."""
        if self.docstring or "." not in self.name:
            return self.dotted
        return self.dotted.rpartition(".")[0]

    @property
    def key(self) -> str:
        """`module:name` of the top-level definition: what tests verify."""
        return f"{self.module}:{self.name.split('.')[0]}"


def module_path(module: str, root: Path | None = None) -> Path:
    """The file of a dotted module below `root`, or SymbolError."""
    root = root or config.SOURCE
    path = module_file(module, root)
    if path is None:
        raise SymbolError(f"no module {module!r} below {root.name}/")
    return path


@kept_by_file
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@kept_by_file
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def resolve(reference: str, root: Path | None = None) -> Symbol:
    """Find `package.module:name` or `package.module:Class.method`.

    Raises:
        SymbolError: no such module or name, or the name is imported there from
            elsewhere (then the message says where it is defined).
    """
    root = root or config.SOURCE
    module, colon, name = reference.partition(":")
    if not colon or not name or not module:
        raise SymbolError(f"{reference!r} is not of the form package.module:name")
    path = module_path(module, root)
    first, last, docstring = _lines(reference, path)
    lines = _text(path).splitlines()
    return Symbol(
        module,
        name,
        path.relative_to(root.parent).as_posix(),
        first,
        last,
        "\n".join(lines[first - 1 : last]),
        docstring,
    )


def _lines(reference: str, path: Path) -> tuple[int, int, tuple[int, int] | None]:
    where, _, name = reference.partition(":")
    body = _tree(path).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in body if part in names(n)), None)
        if node is None:
            package = path.name == "__init__.py"
            raise SymbolError(f"{reference}{_why(where, package, part, body)}")
        where, body = f"{where}.{part}", getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    docstring = None
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        head = node.body[0]
        if ast.get_docstring(node) is not None and head.end_lineno:
            docstring = (head.lineno, head.end_lineno)
    return first, node.end_lineno, docstring


def _why(where: str, package: bool, name: str, body: list[ast.stmt]) -> str:
    """Why these statements do not define a name."""
    parents = [*where.split("."), "it"] if package else where.split(".")
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    above = parents[: -node.level] if node.level else []
                    home = ".".join([*above, *filter(None, [node.module])])
                    there = f"{home}:{alias.name}"
                    return f" is imported there, not defined: write {there!r}"
    known = [own for node in body for own in names(node)]
    return f": {where} has no {name!r}; it has: {', '.join(known) or 'nothing'}"


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
