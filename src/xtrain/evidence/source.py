"""Find the file of a module, and the definition of a symbol, without importing them.

A symbol is "package.module:name": a function, class or constant at the top level of its
module.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from xtrain.evidence.closure import module_files


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
    # Only the top package is looked up by Python; going deeper would import it.
    spec = importlib.util.find_spec(module.partition(".")[0])
    places: list[str | None] = [spec.origin] if spec else []
    if spec is not None and spec.submodule_search_locations is not None:
        places = list(spec.submodule_search_locations)
    path = module_file(module, *(Path(place).parent for place in places if place))
    if path is None:
        raise ValueError(f"{symbol!r}: there is no module {module}")
    return path, name


def module_file(module: str, *folders: Path) -> Path | None:
    """The file of a dotted module below one of the folders; None without one."""
    bases = (folder.joinpath(*module.split(".")) for folder in folders)
    files = (file for base in bases for file in module_files(base))
    return next(filter(Path.is_file, files), None)


def module_name(file: Path, folder: Path) -> str:
    """The dotted name of a file below the folder; a package's for its `__init__.py`."""
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
