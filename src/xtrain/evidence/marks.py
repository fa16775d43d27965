"""Read the `verifies` marks of a folder of tests without importing any of them.

    @pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
    def test_sum(): ...

    {"xtrain.comm.ring:ring_all_reduce": {"tests/comm/test_ring.py::test_sum"}}

This is what a full test run would record, known in milliseconds. A mark counts on a
function, a class, a `pytestmark`, and inside `pytest.param(marks=...)`, also of a list
of cases with a name of its own. Its symbols are strings, or expressions of constants
and names that the file assigns: `NAME`, `*NAMES`, `NAMES[2]`.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtrain.evidence.source import names as names_of

Marked = dict[str, set[str]]


@dataclass
class _Names:
    """What a file assigns at its top: expressions, and the values they could be."""

    trees: dict[str, ast.expr] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def value_of(self, tree: ast.expr) -> Any:
        """What an expression without any call is worth; None where that fails."""
        if any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(tree)):
            return None
        code = compile(ast.Expression(tree), "<marks>", "eval")
        try:
            return eval(code, {"__builtins__": {}, **self.values})
        except Exception:  # a name that is imported, say
            return None


def marked_tests(folder: Path, root: Path) -> Marked:
    """Symbol -> ids of the tests (without parameters) that are marked with it.

    Ids are relative to `root`, as pytest prints them.
    """
    marked: Marked = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = _names(tree.body)
        prefix = path.relative_to(root).as_posix()
        _collect(tree.body, prefix, set(), names, marked)
    return marked


def _collect(
    body: list[ast.stmt],
    prefix: str,
    inherited: set[str],
    names: _Names,
    marked: Marked,
) -> None:
    here = inherited | {
        symbol
        for node in body
        if isinstance(node, ast.Assign) and names_of(node) == ["pytestmark"]
        for symbol in _symbols(node.value, names)
    }
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        symbols = set(here)
        for decorator in node.decorator_list:
            symbols |= _symbols(decorator, names)
        name = f"{prefix}::{node.name}"
        if isinstance(node, ast.ClassDef):
            if node.name.startswith("Test"):
                _collect(node.body, name, symbols, names, marked)
        elif node.name.startswith("test"):
            for symbol in symbols:
                marked.setdefault(symbol, set()).add(name)


def _symbols(tree: ast.expr, names: _Names) -> set[str]:
    """The arguments of every `...verifies(...)` call in an expression."""
    found: set[str] = set()
    for node in _with_named_parts(tree, names):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "verifies":
            continue
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                symbols = names.value_of(argument.value)
            else:
                symbols = [names.value_of(argument)]
            found.update(text for text in symbols or () if isinstance(text, str))
    return found


def _with_named_parts(tree: ast.expr, names: _Names) -> list[ast.AST]:
    """All nodes of an expression, and of those that its names stand for."""
    nodes = list(ast.walk(tree))
    seen: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in names.trees.keys() - seen:
            seen.add(node.id)
            nodes.extend(ast.walk(names.trees[node.id]))
    return nodes


def _names(body: list[ast.stmt]) -> _Names:
    names = _Names()
    for node in body:
        if isinstance(node, ast.Assign):
            for name in names_of(node):
                names.trees[name] = node.value
                names.values[name] = names.value_of(node.value)
    return names
