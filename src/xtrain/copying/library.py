"""What there is to copy of the library: the public names of its packages."""

import ast
from pathlib import Path

from xtrain.copying.modules import SOURCE, Module, module_path, read_module

NOT_FOR_COPIES = {"bench", "copying", "testing", "whiteboard"}


def library(root: Path = SOURCE) -> dict[str, str]:
    """Every public function and class of a lecture: its name and `module:name`."""
    found: dict[str, str] = {}
    for path in sorted((root / "xtrain").glob("*/__init__.py")):
        package = path.parent.name
        if package in NOT_FOR_COPIES:
            continue
        module = read_module(f"xtrain.{package}", root)
        for name in public_names(path):
            reference = home_of(module, name, root)
            if reference is not None:
                found.setdefault(name, reference)
    return found


def public_names(path: Path) -> list[str]:
    """The names in `__all__` of a package."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [str(name) for name in ast.literal_eval(value)]
    return []


def home_of(module: Module, name: str, root: Path) -> str | None:
    """`module:name` of the function or class that a module knows under a name.

    Of a class that only stands around another of its name, that of the other one.
    """
    if name in module.imported:
        found = module.imported[name][0]
        if found.name is None or module_path(found.home, root) is None:
            return None
        return home_of(read_module(found.home, root), found.name, root)
    definition = module.defined.get(name, [None])[0]
    if definition is None:
        return None
    node = ast.parse(definition.text).body[0]
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return None
    for base in getattr(node, "bases", []):
        local = base.id if isinstance(base, ast.Name) else ""
        if [found.name for found in module.imported.get(local, [])] == [name]:
            return home_of(module, local, root)
    return f"{module.name}:{name}"
