"""Make one symbol stand alone: the file behind "copy with imports".

The symbol, every module-level name it needs (from its own module and from other
xtrain modules, transitively) and the third-party imports they use. The result
runs without xtrain installed.
"""

import ast
import builtins
from dataclasses import dataclass, field
from pathlib import Path

from . import config
from .symbols import SymbolError, module_path, resolve


@dataclass
class _Module:
    name: str
    is_package: bool
    text: list[str]
    defined: dict[str, ast.stmt]
    imported: dict[str, tuple[str, str | None]]  # local name -> (module, name)


@dataclass
class _Closure:
    root: Path
    modules: dict[str, _Module] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    pieces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def module(self, name: str) -> _Module:
        if name not in self.modules:
            path = module_path(name, self.root)
            text = path.read_text()
            module = _Module(
                name, path.name == "__init__.py", text.splitlines(), {}, {}
            )
            for node in _statements(ast.parse(text).body):
                self._read(module, node)
            self.modules[name] = module
        return self.modules[name]

    def _read(self, module: _Module, node: ast.stmt) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    local = alias.asname or alias.name.split(".")[0]
                    whole = alias.name if alias.asname else local
                    if not alias.asname:
                        module.imported[local] = (alias.name, None)
                    else:
                        module.imported[local] = (whole, None)
            case ast.ImportFrom():
                home = _absolute(module, node)
                for alias in node.names:
                    local = alias.asname or alias.name
                    module.imported[local] = (home, alias.name)
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                module.defined[node.name] = node
            case ast.Assign():
                for target in node.targets:
                    for name in ast.walk(target):  # also `A, B = range(2)`
                        if isinstance(name, ast.Name):
                            module.defined[name.id] = node
            case ast.AnnAssign(target=ast.Name(id=name)):
                module.defined[name] = node

    def add(self, module_name: str, name: str) -> None:
        module = self.module(module_name)
        if name in module.imported:
            self._import(module, name)
            return
        if name not in module.defined:
            return
        if name in self.pieces:
            if self.pieces[name][0] != module_name:
                raise SymbolError(
                    f"two modules define {name!r}: {self.pieces[name][0]} and "
                    f"{module_name}; rename one, so that the code can be copied"
                )
            return
        node = module.defined[name]
        self.pieces[name] = (module_name, "")  # breaks cycles; filled in below
        for used in _names(node):
            self.add(module_name, used)
        first = min(
            [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
        )
        text = "\n".join(module.text[first - 1 : node.end_lineno])
        del self.pieces[name]  # after what it needs
        self.pieces[name] = (module_name, text)

    def _import(self, module: _Module, local: str) -> None:
        home, name = module.imported[local]
        ours = home.split(".")[0] == module.name.split(".")[0]
        if name is None:
            if ours:
                raise SymbolError(
                    f"{module.name} imports the module {home}; import the names "
                    "it needs instead, so that the code can be copied"
                )
            plain = f"import {home}"
            as_ = "" if home.split(".")[0] == local else f" as {local}"
            self.imports.add(plain + as_)
            return
        if not ours:
            as_ = "" if name == local else f" as {local}"
            self.imports.add(f"from {home} import {name}{as_}")
            return
        self.add(home, name)
        if name != local:
            self.pieces.setdefault(local, (module.name, f"{local} = {name}"))


def _absolute(module: _Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += _statements([*node.body, *node.orelse])
    return found


def _names(node: ast.AST) -> list[str]:
    used = {
        n.id: None
        for n in ast.walk(node)
        if isinstance(n, ast.Name) and not hasattr(builtins, n.id)
    }
    return list(used)


def standalone(reference: str, root: Path | None = None) -> str:
    """The text of a file that defines `module:name` and needs no xtrain.

    Raises:
        SymbolError: unknown symbol, or two needed names collide.
    """
    root = root or config.SOURCE
    symbol = resolve(reference, root)
    closure = _Closure(root)
    top = symbol.name.split(".")[0]
    closure.add(symbol.module, top)
    grouped = sorted(closure.imports, key=lambda line: (line.startswith("from"), line))
    blocks = [f"# {reference}, with everything of xtrain that it uses.", *grouped]
    # A statement that defines several names stands once.
    texts = list(dict.fromkeys(text for _, text in closure.pieces.values()))
    return "\n".join(blocks) + "\n\n\n" + "\n\n\n".join(texts) + "\n"
