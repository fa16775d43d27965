"""A module of ours as statements: what each defines, uses, and imports."""

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from xtrain.copying.used_names import (
    UsedNames,
    names_bound,
    names_changed,
    names_used,
)

SOURCE = Path(__file__).resolve().parents[2]  # src/, or where a wheel was installed


class CopyError(ValueError):
    """This cannot be copied: the message says which name of which module is why."""


@dataclass(eq=False)
class Statement:
    """A statement of a module, as it stands there."""

    module: str
    line: int
    text: str
    used: UsedNames


@dataclass(frozen=True)
class Import:
    """A name that a module has from another: the whole of it where `name` is None."""

    home: str
    name: str | None
    local: str

    @property
    def meaning(self) -> str:
        """What the name is: `import torch` and `import torch.nn` name one thing."""
        whole = self.name is None and self.local == self.home.split(".")[0]
        return f"import {self.local}" if whole else self.text

    @property
    def text(self) -> str:
        """The import, for a module that is not ours."""
        if self.name is None:
            whole = self.local == self.home.split(".")[0]
            return f"import {self.home}" + ("" if whole else f" as {self.local}")
        return f"from {self.home} import {self.part}"

    @property
    def part(self) -> str:
        """What stands behind `import`, where a name is imported."""
        renamed = "" if self.local == self.name else f" as {self.local}"
        return f"{self.name}{renamed}"


@dataclass
class Module:
    """What the names of a module are: several statements may define one name."""

    name: str
    defined: dict[str, list[Statement]] = field(default_factory=dict)
    imported: dict[str, list[Import]] = field(default_factory=dict)
    star: str | None = None  # `from star import *`
    future: bool = False  # `from __future__ import annotations`


def module_path(name: str, root: Path) -> Path | None:
    """The file of a dotted module below `root`."""
    base = root.joinpath(*name.split("."))
    paths = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


def read_module(name: str, root: Path) -> Module:
    """A module's statements by the names they define; nothing is imported."""
    path = module_path(name, root)
    if path is None:
        raise CopyError(f"no module {name!r} below {root.name}/")
    return _read(name, path, path.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _read(name: str, path: Path, stamp: int) -> Module:
    del stamp  # part of the cache key: a changed file is read again
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    module = Module(name)
    for node in ast.parse(text).body:
        _add(module, node, lines, path.name == "__init__.py")
    return module


def _add(module: Module, node: ast.stmt, lines: list[str], is_package: bool) -> None:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for inner in (*node.body, *node.orelse):  # names that annotations use
            _add(module, inner, lines, is_package)
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        _add_import(module, node, is_package)
        return
    names = names_bound(node) - {"__all__"}
    names |= names_changed(node) & module.defined.keys()
    if names:
        statement = _statement(module.name, node, lines)
        for name in names:
            module.defined.setdefault(name, []).append(statement)


def _statement(module: str, node: ast.stmt, lines: list[str]) -> Statement:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    text = "\n".join(lines[first - 1 : node.end_lineno])
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom | ast.Import):
            home = part.module or "" if isinstance(part, ast.ImportFrom) else None
            homes = [a.name if home is None else home for a in part.names]
            relative = isinstance(part, ast.ImportFrom) and part.level > 0
            ours = {h.split(".")[0] for h in homes} & {module.split(".")[0]}
            if ours or relative:
                raise CopyError(
                    f"{module}, line {part.lineno}: an import of ours inside of "
                    "something cannot be copied: import it at the top"
                )
    return Statement(module, first, text, names_used(text, node))


def _add_import(
    module: Module, node: ast.Import | ast.ImportFrom, is_package: bool
) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            found = Import(alias.name, None, local)
            module.imported.setdefault(local, []).append(found)
        return
    home = _absolute(module.name, node, is_package)
    for alias in node.names:
        local = alias.asname or alias.name
        if home == "__future__":
            module.future = module.future or alias.name == "annotations"
        elif alias.name == "*":
            module.star = home
        else:
            found = Import(home, alias.name, local)
            module.imported.setdefault(local, []).append(found)


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
