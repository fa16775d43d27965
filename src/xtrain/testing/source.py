"""Find a symbol's source without importing it, and reduce it to a digest.

A symbol is "package.module:name", a function, class or constant at the top level of
its module. The digest changes when any character of its lines does, decorators
included, and not when something else in the file does.
"""

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path


def digest(symbol: str) -> str:
    """sha256 of the symbol's lines; ValueError when there is no such symbol."""
    return hashlib.sha256(definition(symbol).encode()).hexdigest()


def definition(symbol: str) -> str:
    """The symbol's lines; ValueError when there is no such symbol."""
    path, name = locate(symbol)
    source = _definitions(path, path.stat().st_mtime_ns).get(name)
    if source is None:
        raise ValueError(f"{symbol!r}: {path} defines no {name!r} at its top level")
    return source


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


@cache
def _definitions(path: Path, changed: int) -> dict[str, str]:
    """Source of every top-level definition; `changed` makes an edit a new key."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        found.update(dict.fromkeys(_names(node), source))
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
