"""Marks are read from the text of tests, and ours stand on single tests."""

import ast

from xtrain.evidence.marks import marked_tests


def test_what_a_run_would_see_is_read_without_importing(tmp_path):
    """Values of expressions, not only literal strings; and marks of cases."""
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("@pytest.mark.verifies('d:none')\ndef test(): 0")
    (folder / "test_named.py").write_text(
        "from elsewhere import UNKNOWN\n"
        "ONE = 'a:one'\n"
        "MANY = [f'b:{n}' for n in ('two', 'three')] + [ONE]\n"
        "TABLE = {1: ONE, 2: 'c:four'}\n"
        "CASE = pytest.param(1, marks=pytest.mark.verifies(TABLE[2]))\n"
        "CASES = [CASE, pytest.param(2)]\n"
        "@pytest.mark.slow\n@pytest.mark.verifies(ONE, 'b:two')\ndef test_name(): ...\n"
        "@pytest.mark.verifies(*MANY[:2], UNKNOWN, call(ONE))\ndef test_slice(): ...\n"
        "@pytest.mark.parametrize('n', CASES)\ndef test_cases(n): ...\n"
        "@pytest.mark.verifies('d:none')\ndef helper(): ...\n"
        "def test_none(): return CASES\n"
    )
    name, part, cases = (
        f"tests/deep/test_named.py::test_{n}" for n in ("name", "slice", "cases")
    )
    assert marked_tests(tmp_path / "tests", tmp_path) == {
        "a:one": {name}, "b:two": {name, part}, "b:three": {part}, "c:four": {cases}
    }  # fmt: skip


WHOLESALE = """
pytestmark = [pytest.mark.slow, pytest.mark.verifies("a:one")]

@pytest.mark.verifies("b:two")
class TestMany:
    @pytest.mark.verifies("c:three")
    def test_in_class(self): ...

@pytest.mark.verifies("d:four")
def test_plain(): ...
"""


def wholesale(text: str) -> list[str]:
    """Marks outside of single functions: of a file or a class, which say of no test
    what it is about."""
    body = ast.parse(text).body
    outer = [n for n in body if isinstance(n, ast.ClassDef) or
             "pytestmark" in ast.unparse(n).partition("=")[0]]  # fmt: skip
    return [said for node in outer if "verifies" in (said := ast.unparse(node))]


def test_ours_stand_on_single_tests(request):
    tests = request.config.rootpath / "tests"
    found = {path: wholesale(path.read_text()) for path in tests.rglob("test_*.py")}
    assert {str(path): marks for path, marks in found.items() if marks} == {}
    assert len(wholesale(WHOLESALE)) == 2
