"""Marks are read from the text of tests, and ours stand on single tests."""

import ast

from xtrain.evidence.marks import marked_tests

MARKS = """
import pytest
SYMBOLS = ("a:one", "a:two")
pytestmark = [pytest.mark.slow, pytest.mark.verifies(*SYMBOLS)]

@pytest.mark.verifies("b:three")
def test_plain(): ...

CASES = 1
@pytest.mark.parametrize("x", [pytest.param(2, marks=pytest.mark.verifies("b:four"))])
def test_param(x): ...

@pytest.mark.verifies("c:five")
class TestMany:
    pytestmark = pytest.mark.verifies("c:six")
    @pytest.mark.verifies("c:seven")
    def test_in_class(self): ...
    def helper(self): ...

def helper(): ...
"""


def test_marks_are_read_without_importing(tmp_path):
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_marks.py").write_text(MARKS)
    (folder / "helper.py").write_text("pytestmark = pytest.mark.verifies('d:none')")
    file = "tests/deep/test_marks.py"
    plain, param = f"{file}::test_plain", f"{file}::test_param"
    inner = f"{file}::TestMany::test_in_class"
    assert marked_tests(tmp_path / "tests", tmp_path) == {
        "a:one": {plain, param, inner},
        "a:two": {plain, param, inner},
        "b:three": {plain},
        "b:four": {param},
        "c:five": {inner},
        "c:six": {inner},
        "c:seven": {inner},
    }


def test_marks_may_be_named_sliced_and_stand_in_cases_of_a_name(tmp_path):
    """What a run would see: values of expressions, not only literal strings."""
    path = tmp_path / "tests" / "test_named.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "from elsewhere import UNKNOWN\n"
        "ONE = 'a:one'\n"
        "MANY = [f'b:{n}' for n in ('two', 'three')] + [ONE]\n"
        "TABLE = {1: ONE, 2: 'c:four'}\n"
        "CASE = pytest.param(1, marks=pytest.mark.verifies(TABLE[2]))\n"
        "CASES = [CASE, pytest.param(2)]\n"
        "@pytest.mark.verifies(ONE)\ndef test_name(): ...\n"
        "@pytest.mark.verifies(*MANY[:2], UNKNOWN, call(ONE))\ndef test_slice(): ...\n"
        "@pytest.mark.parametrize('n', CASES)\ndef test_cases(n): ...\n"
        "def test_none(): return CASES\n"
    )
    file = "tests/test_named.py"
    assert marked_tests(tmp_path / "tests", tmp_path) == {
        "a:one": {f"{file}::test_name"},
        "b:two": {f"{file}::test_slice"},
        "b:three": {f"{file}::test_slice"},
        "c:four": {f"{file}::test_cases"},
    }


def wholesale(text: str) -> list[str]:
    """Marks of a file or a class: they say of no test what it is about."""
    nodes = list(ast.walk(ast.parse(text)))
    marks: list[ast.AST] = [
        node
        for node in nodes
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    marks += [d for n in nodes if isinstance(n, ast.ClassDef) for d in n.decorator_list]
    return [said for mark in marks if "verifies" in (said := ast.unparse(mark))]


def test_ours_stand_on_single_tests(request):
    tests = request.config.rootpath / "tests"
    found = {path: wholesale(path.read_text()) for path in tests.rglob("test_*.py")}
    assert {str(path): marks for path, marks in found.items() if marks} == {}
    assert len(wholesale(MARKS)) == 3
