"""Results of tests: which code they are of, and for which symbols they are evidence."""

import ast

import pytest

from xtrain.evidence import results
from xtrain.evidence.source import definition
from xtrain.evidence.store import Entry

ROOM, CELLAR = "house:room", "house:Cellar"
TEST = "tests/test_house.py::test_room[4]"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Modules on the path; importing them would fail."""
    for name, text in {
        "house.py": "raise ImportError\n\n@cached\ndef room(x): ...\n"
        "class Cellar: ...\nHEIGHT: int = 2\n",
        "inn/__init__.py": "raise ImportError\n",
        "inn/floor/__init__.py": "def hall(): ...\n",
        "inn/floor/first.py": "def bed(): ...\n",
        "tests/test_house.py": "from house import room\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_symbols_are_found_without_importing(root):
    symbols = (ROOM, CELLAR, "house:HEIGHT", "inn.floor:hall", "inn.floor.first:bed")
    assert len({ast.unparse(definition(symbol)) for symbol in symbols}) == 5


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
def test_an_unknown_symbol_is_named(root, symbol, message):
    with pytest.raises(ValueError, match=message):
        results.entry_of(TEST, [symbol], root)


def test_a_result_is_of_its_file_and_of_the_modules_it_is_marked_with(root):
    entry = results.entry_of(TEST, ["inn.floor.first:bed", ROOM, CELLAR], root)
    assert entry.roots == (
        "tests/test_house.py", "house.py", "inn/floor/first.py"
    )  # fmt: skip
    for file in (*entry.roots, "inn/__init__.py"):
        before = (root / file).read_text()
        (root / file).write_text(f"{before}# a word\n")
        assert not entry.is_good(root), file
        (root / file).write_text(before)
    assert entry.is_good(root)


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped"])
def test_a_pass_counts_for_what_it_ran_and_a_failure_against_all(outcome):
    ran = {ROOM: [("gloo", 4)], CELLAR: None, "house:HEIGHT": []}
    value, about = results.value_of(outcome, 0.123, ran), {"device": "cpu"}
    found = results.by_symbol({TEST: Entry("k", "2.13", (), value)}, about)
    assert (CELLAR in found) == (outcome != "passed")
    places = [("gloo", 4)]
    assert found[ROOM] == [results.Result(TEST, outcome, places, "2.13", about)]
    assert found["house:HEIGHT"][0].places == []
    assert found[ROOM][0].passed == (outcome == "passed")


def test_names_of_tests_come_apart():
    assert results.file_of("tests/a.py::test_b[a::b]") == "tests/a.py"
    assert results.function_of("tests/a.py::test_b[a[0]]") == "tests/a.py::test_b"
