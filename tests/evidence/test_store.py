"""The verification record: digests, merging, staleness."""

import ast
import json
import multiprocessing
from pathlib import Path

import pytest

from xtrain.testing import record
from xtrain.evidence.marks import marked_tests
from xtrain.evidence.source import digest

SYMBOL = "house:room"
OTHER = "house:Cellar"
TEST = "tests/test_house.py::test_room"
HEAD = {"backend": "gloo", "device": "cpu"}
MARKED = {SYMBOL: {TEST}, OTHER: {"tests/test_house.py::test_cellar"}}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A module on the path, to be edited; importing it would fail."""
    path = tmp_path / "house.py"
    path.write_text(
        "raise ImportError\n\n@cached\n@named('room')\ndef room(x):\n    return x\n\n\n"
        "class Cellar:\n    depth = 3\n\nHEIGHT: int = 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


@pytest.fixture
def inn(tmp_path, monkeypatch):
    """A package, of which only the first level may be looked up."""
    folder = tmp_path / "inn" / "floor"
    folder.mkdir(parents=True)
    (tmp_path / "inn" / "__init__.py").write_text("raise ImportError\n")
    (folder / "__init__.py").write_text("def hall(): ...\n")
    (folder / "first.py").write_text("def bed(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Tests run in the repository in which the tests of the house stand."""
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "tests/test_house.py").write_text("from house import room\n")
    monkeypatch.chdir(tmp_path)


def passed(test=TEST, symbol=SYMBOL, outcome="passed", places=(("gloo", 2),)):
    stamp = record.stamp_of(test, symbol, Path.cwd())
    proof = digest(symbol), stamp, None if places is None else list(places)
    return record.Result(test, outcome, {symbol: proof}, 0.5)


def merge(old, results):
    return record.merge(old, HEAD, results, MARKED, Path.cwd())


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("return x", "return y", True),
        ("'room'", "'bath'", True),
        ("@cached\n", "", True),
        ("def room(x):", "def room(x):  # roomy", True),
        ("depth = 3", "depth = 4", False),
        ("raise ImportError\n", "raise ImportError\n\n\n# a comment\n", False),
    ],
)
def test_a_digest_follows_the_lines_of_its_symbol_alone(house, old, new, changes):
    before = digest(SYMBOL)
    edit(house, old, new)
    assert (digest(SYMBOL) != before) == changes


def test_symbols_are_found_without_importing(house, inn):
    found = {digest(s) for s in (SYMBOL, OTHER, "house:HEIGHT", "inn.floor:hall")}
    assert len(found | {digest("inn.floor.first:bed")}) == 5


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("house:attic", "defines no 'attic'"),
        ("house", "not of the form"),
        ("house:", "not of the form"),
        ("hut:room", "no module hut"),
        ("inn.floor.second:bed", "no module inn.floor.second"),
    ],
)
def test_an_unknown_symbol_is_named(house, inn, symbol, message):
    with pytest.raises(ValueError, match=message):
        digest(symbol)


def test_a_run_adds_to_what_earlier_runs_saw(house):
    cellar = "tests/test_house.py::test_cellar"
    first = merge({}, [passed()])
    second = merge(first, [passed(cellar, OTHER)])
    assert set(second["symbols"]) == {SYMBOL, OTHER}
    assert second["symbols"][SYMBOL] == first["symbols"][SYMBOL]
    third = merge(second, [passed(outcome="failed")])
    assert [t["outcome"] for t in third["symbols"][SYMBOL]["tests"]] == ["failed"]


def test_results_on_older_source_are_forgotten(house):
    first = merge({}, [passed()])
    edit(house, "return x", "return -x")
    assert merge(first, [])["symbols"] == {}


@pytest.mark.parametrize("file", ["house.py", "tests/test_house.py", "cupboard.py"])
def test_results_are_forgotten_when_anything_their_test_reaches_changes(house, file):
    Path("tests/conftest.py").write_text("")
    # What stands beside the tests is found from the root of the repository.
    Path("tests/test_house.py").write_text("import cupboard\n")
    Path("cupboard.py").write_text("")
    first = merge({}, [passed()])
    assert SYMBOL in merge(first, [])["symbols"]
    Path("unrelated.py").write_text("X = 1\n")
    assert SYMBOL in merge(first, [])["symbols"]
    Path(file).write_text(Path(file).read_text() + "# a word\n")
    assert merge(first, [])["symbols"].get(SYMBOL, {"tests": []})["tests"] == []


def test_results_of_tests_that_are_gone_are_forgotten(house):
    gone = passed("tests/test_house.py::test_old[3]")
    first = merge({}, [gone, passed(TEST + "[a::b]")])
    assert len(first["symbols"][SYMBOL]["tests"]) == 2
    second = merge(first, [])
    assert [t["id"] for t in second["symbols"][SYMBOL]["tests"]] == [TEST + "[a::b]"]


def test_the_record_has_the_agreed_shape(house, tmp_path):
    path = tmp_path / "deep" / "gloo-cpu.json"
    record.update(path, HEAD, [passed()], MARKED, tmp_path)
    written = json.loads(path.read_text())
    assert written.pop("created").endswith("+00:00")
    assert written == {
        "schema": record.SCHEMA,
        **HEAD,
        "symbols": {
            SYMBOL: {
                "digest": digest(SYMBOL),
                "tests": [
                    {
                        "id": TEST,
                        "outcome": "passed",
                        "stamp": record.stamp_of(TEST, SYMBOL, tmp_path),
                        "places": [["gloo", 2]],
                        "seconds": 0.5,
                    }
                ],
            }
        },
    }


def test_runs_that_end_together_do_not_lose_results(house, tmp_path):
    path = tmp_path / "gloo-cpu.json"
    names = [f"tests/test_house.py::test_room[{i}]" for i in range(8)]
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(
            target=record.update, args=(path, HEAD, [passed(name)], MARKED, tmp_path)
        )
        for name in names
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [t["id"] for t in record.read(path)["symbols"][SYMBOL]["tests"]] == names


def test_a_broken_record_counts_as_none(tmp_path):
    path = tmp_path / "gloo-cpu.json"
    assert record.read(path) == {}
    path.write_text('{"schema": 1, "symbols": {}}')
    assert record.read(path) == {}
    path.write_text("{")
    assert record.read(path) == {}


def problems(*results):
    return found([merge({}, results)] if results else [])


def found(records):
    return record.problems(records, {SYMBOL: {TEST}}, Path.cwd())


def test_the_check_says_what_is_missing(house):
    assert problems(passed()) == []
    assert problems(passed(TEST + "[1]"), passed(TEST + "[2]")) == []
    assert problems() == [f"{SYMBOL}: {TEST} has not run"]
    assert problems(passed(outcome="failed")) == [f"{SYMBOL}: {TEST} failed"]
    assert problems(passed(outcome="skipped")) == [
        f"{SYMBOL}: all of its tests were skipped"
    ]
    unused = f"{SYMBOL}: {TEST} is marked with it and does not run it"
    assert problems(passed(places=None)) == [unused]
    assert problems(passed(TEST + "[1]", places=None), passed(TEST + "[2]")) == []
    old = merge({}, [passed()])
    edit(house, "return x", "return -x")
    stale = found([old])
    assert stale == [f"{SYMBOL}: code has changed since its tests ran"]
    # Another machine's record on the current source makes up for it.
    new = merge({}, [passed()])
    assert found([old, new]) == []
    house.write_text("")
    assert found([old]) == [f"{SYMBOL}: there is no such symbol"]


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


def test_the_command_line_answers_with_its_exit_code(house, tmp_path, capsys):
    tests, records = tmp_path / "tests", tmp_path / "records"
    (tests / "test_house.py").write_text(
        f"@pytest.mark.verifies({SYMBOL!r})\ndef test_room(): ...\n"
    )
    arguments = ["--check", "--tests", str(tests), "--records", str(records)]
    assert record.main(arguments) == 1
    assert capsys.readouterr().out == f"{SYMBOL}: {TEST} has not run\n"
    record.update(records / "gloo-cpu.json", HEAD, [passed()], MARKED, tmp_path)
    assert record.main(arguments) == 0
    assert capsys.readouterr().out == "1 symbols are verified as they stand\n"
