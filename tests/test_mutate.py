"""The tool that makes mutants, tried on one file with a weak and with a strong test."""

import ast
from pathlib import Path

import pytest

from tests.mutate import OPERATORS, draw, likely_tests, main, mutants_of

SOURCE = '''
def clamp(value: int, low: int = 0) -> int:
    """Not below `low` = 0."""
    if value < low:
        raise ValueError(f"{value} < {0}")
    return value - low
'''
WEAK = """
from toy.clamp import clamp

def test_clamp():
    assert clamp(5) == 5
"""
STRONG = (
    WEAK
    + """
    assert clamp(2, 2) == 0
    assert clamp(5, 3) == 2
    assert clamp(0) == 0
    for value in (-1, -2):
        try:
            clamp(value)
        except ValueError:
            continue
        raise AssertionError(value)
"""
)
EVERYTHING = """
def everything(a, b):
    while not a:
        if a and b:
            break
        print(a, b, end="")
    a.b = a < b
    return a + 1
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository of one file, entered: `toy(source, test)` gives that file."""

    def make(source: str, test: str = "") -> Path:
        for path, text in (
            ("src/toy/__init__.py", ""),
            ("src/toy/clamp.py", source),
            ("tests/toy/test_clamp.py", test),
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts sooner
        return Path("src/toy/clamp.py")

    return make


def test_every_operator_finds_its_place_and_changes_it_alone(toy):
    file = toy(EVERYTHING)
    mutants = mutants_of(file)
    assert {mutant.operator for mutant in mutants} == set(OPERATORS)
    trees = {ast.dump(ast.parse(mutant.source)) for mutant in mutants}
    assert len(trees) == len(mutants)
    assert ast.dump(ast.parse(EVERYTHING)) not in trees
    for mutant in mutants:
        lines = zip(EVERYTHING.splitlines(), mutant.source.splitlines(), strict=True)
        differ = [line for line, pair in enumerate(lines, 1) if len({*pair}) == 2]
        assert differ == [mutant.line], mutant


def test_words_and_annotations_stay_as_they_are(toy):
    for mutant in mutants_of(toy(SOURCE)):
        assert '"""Not below `low` = 0."""' in mutant.source
        assert "value: int" in mutant.source
        assert "raise" not in mutant.source or '(f"{value} < {0}")' in mutant.source


def test_a_seed_draws_the_same_mutants_again(toy):
    file = toy(EVERYTHING)
    drawn = draw([file], 8, 1)
    assert drawn == draw([file], 8, 1) != draw([file], 8, 2)
    assert len(set(draw([file], 1000, 3))) == len(mutants_of(file))


def test_the_tests_named_after_a_file_come_first(toy):
    file = toy(SOURCE, WEAK)
    folder = Path("tests/toy")
    (folder / "test_all.py").write_text("import toy.clamp")
    (folder / "test_other.py").write_text("import toy.clamped")
    likely = ["tests/toy/test_clamp.py", "tests/toy/test_all.py"]
    assert likely_tests(file, widen=False) == likely
    assert likely_tests(file, widen=True) == [*likely, "tests/toy/test_other.py"]
    assert likely_tests(Path("src/toy/untested.py"), widen=False) == ["tests/toy"]


def test_a_weak_test_lets_mutants_live_and_a_strong_one_does_not(toy, capsys):
    file = toy(SOURCE, WEAK)
    everything = ["--files", str(file), "--count", "1000", "--seed", "5"]
    count = len(mutants_of(file))
    numbers = [
        str(number)
        for number, mutant in enumerate(draw([file], 1000, 5), 1)
        if mutant.operator in ("moved boundary", "arithmetic")
    ]
    assert len(numbers) == 2
    assert main([*everything, "--only", *numbers]) == 1
    said = capsys.readouterr().out
    assert f"seed 5: {count} mutants" in said
    assert "- value < low\n    + value <= low\n    SURVIVED" in said
    assert "0 of 2 caught" in said

    Path("tests/toy/test_clamp.py").write_text(STRONG)
    assert main([*everything, "--only", *numbers]) == 0
    said = capsys.readouterr().out
    assert said.count("test_clamp.py::test_clamp") == 2
    assert "2 of 2 caught; left: []" in said
    assert file.read_text() == SOURCE


def test_tests_that_fail_without_a_mutant_judge_nothing(toy):
    file = toy(SOURCE, "def test_clamp():\n    assert False\n")
    with pytest.raises(SystemExit, match="without any mutant: caught after"):
        main(["--files", str(file), "--count", "1"])


def test_a_run_that_never_ends_is_caught(toy, capsys):
    file = toy(
        "def count(n):\n    while n > 0:\n        n -= 1\n    return n\n",
        "from toy.clamp import count\ndef test_count():\n    assert count(3) == 0\n",
    )
    forever = next(
        number
        for number, mutant in enumerate(draw([file], 1000, 0), 1)
        if mutant.operator == "without statement"
    )
    call = ["--files", str(file), "--count", "1000", "--only", str(forever)]
    assert main([*call, "--limit", "5"]) == 0
    assert "caught: not finished after 5 s" in capsys.readouterr().out
    assert main([*call, "--list"]) == 0
    assert "- n -= 1\n    + pass\n" in capsys.readouterr().out
