"""Find a symbol's definition without importing its module.

A symbol is "package.module:name": a function, class or constant at the top level of its
module.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path


def definition(symbol: str) -> ast.stmt:
    """The statement that defines it; ValueError when there is no such symbol."""
    path, name = locate(symbol)
    found = _definitions(path, path.stat().st_mtime_ns).get(name)
    if found is None:
        raise ValueError(f"{symbol!r}: {path} defines no {name!r} at its top level")
    return found


def locate(symbol: str) -> tuple[Path, str]:
    """The file of a symbol's module and its name."""
    module, separator, name = symbol.partition(":")
    if not separator or not name.isidentifier():
        raise ValueError(f"{symbol!r} is not of the form 'package.module:name'")
    top, *rest = module.split(".")
    # Only the top package is looked up by Python; going deeper would import it.
    spec = importlib.util.find_spec(top)
    if spec and spec.origin and not rest:
        return Path(spec.origin), name
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate, name
    raise ValueError(f"{symbol!r}: there is no module {module}")


def names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [t.id for t in node.targets if isinstance(t, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


@cache
def _definitions(path: Path, changed: int) -> dict[str, ast.stmt]:
    """Every top-level definition; `changed` makes an edit a new key."""
    del changed
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {name: node for node in body for name in names(node)}
