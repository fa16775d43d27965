"""Read the `verifies` marks of a folder of tests without importing any of them.

    @pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
    def test_sum(): ...

    {"xtrain.comm.ring:ring_all_reduce": {"tests/comm/test_ring.py::test_sum"}}

This is what a full test run would record, known in milliseconds. A mark counts on a
function, a class, a `pytestmark`, and inside `pytest.param(marks=...)`; its symbols
are string constants or `*NAME` of a constant in the same file.
"""

import ast
from pathlib import Path

Marked = dict[str, set[str]]


def marked_tests(folder: Path, root: Path) -> Marked:
    """Symbol -> ids of the tests (without parameters) that are marked with it.

    Ids are relative to `root`, as pytest prints them.
    """
    marked: Marked = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree.body)
        prefix = path.relative_to(root).as_posix()
        _collect(tree.body, prefix, set(), constants, marked)
    return marked


def _collect(
    body: list[ast.stmt],
    prefix: str,
    inherited: set[str],
    constants: dict[str, list[str]],
    marked: Marked,
) -> None:
    here = inherited | {
        symbol
        for node in body
        if isinstance(node, ast.Assign) and _targets(node) == ["pytestmark"]
        for symbol in _symbols(node.value, constants)
    }
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        symbols = set(here)
        for decorator in node.decorator_list:
            symbols |= _symbols(decorator, constants)
        name = f"{prefix}::{node.name}"
        if isinstance(node, ast.ClassDef):
            if node.name.startswith("Test"):
                _collect(node.body, name, symbols, constants, marked)
        elif node.name.startswith("test"):
            for symbol in symbols:
                marked.setdefault(symbol, set()).add(name)


def _symbols(tree: ast.expr, constants: dict[str, list[str]]) -> set[str]:
    """The arguments of every `...verifies(...)` call in an expression."""
    found: set[str] = set()
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "verifies":
            continue
        for argument in call.args:
            if isinstance(argument, ast.Starred):
                name = argument.value
                found.update(constants.get(getattr(name, "id", ""), []))
            elif isinstance(argument, ast.Constant):
                found.add(str(argument.value))
    return found


def _constants(body: list[ast.stmt]) -> dict[str, list[str]]:
    """Module-level names bound to a tuple or list of strings."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Tuple | ast.List
        ):
            values = [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
            for name in _targets(node):
                found[name] = [value for value in values if isinstance(value, str)]
    return found


def _targets(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
