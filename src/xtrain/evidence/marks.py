"""Read the `verifies` marks of a folder of tests without importing any of them.

    @pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
    def test_sum(): ...

    {"xtrain.comm.ring:ring_all_reduce": {"tests/comm/test_ring.py::test_sum"}}

This is what a full test run would record, known in milliseconds. A mark counts on a
function and inside `pytest.param(marks=...)`, also of a list of cases that has a name.
Its symbols are strings, or expressions of constants and names that the file assigns:
`NAME`, `*NAMES`, `NAMES[2]`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtrain.evidence.source import names as names_of

Marked = dict[str, set[str]]


def marked_tests(folder: Path, root: Path) -> Marked:
    """Symbol -> ids of the tests (without parameters) that are marked with it.

    Ids are relative to `root`, as pytest prints them.
    """
    marked: Marked = {}
    for path in sorted(folder.rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        trees, values = _assigned(body)
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                name = f"{path.relative_to(root).as_posix()}::{node.name}"
                for tree in _with_named_parts(node.decorator_list, trees):
                    for symbol in _symbols(tree, values):
                        marked.setdefault(symbol, set()).add(name)
    return marked


def _assigned(body: list[ast.stmt]) -> tuple[dict[str, ast.expr], dict[str, Any]]:
    """What a file assigns at its top: expressions, and what they are worth."""
    trees: dict[str, ast.expr] = {}
    values: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Assign):
            for name in names_of(node):
                trees[name], values[name] = node.value, _value(node.value, values)
    return trees, values


def _value(tree: ast.expr, values: dict[str, Any]) -> Any:
    """What an expression without any call is worth; None where that fails."""
    if any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(tree)):
        return None
    code = compile(ast.Expression(tree), "<marks>", "eval")
    try:
        return eval(code, {"__builtins__": {}, **values})
    except Exception:  # a name that is imported, say
        return None


def _with_named_parts(
    found: list[ast.expr], trees: dict[str, ast.expr]
) -> Iterator[ast.AST]:
    """All nodes of some expressions, and of those that their names stand for."""
    waiting, seen = list(found), set[str]()
    for tree in waiting:
        for node in ast.walk(tree):
            yield node
            if isinstance(node, ast.Name) and node.id in trees.keys() - seen:
                seen.add(node.id)
                waiting.append(trees[node.id])


def _symbols(node: ast.AST, values: dict[str, Any]) -> Iterator[str]:
    """The arguments of a `...verifies(...)` call."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".verifies"):
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                found = _value(argument.value, values) or ()
            else:
                found = (_value(argument, values),)
            yield from (symbol for symbol in found if isinstance(symbol, str))
