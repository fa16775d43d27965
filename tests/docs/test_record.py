"""`make record`: what is committed is what this code gave, and CI refuses the rest."""

from dataclasses import replace

import pytest

from xtrain.evidence.closure import torch_minor
from xtrain.evidence.marks import marked_tests
from xtrain.evidence.results import by_symbol, entry_of, value_of
from xtrain_docs import config, kept, record, symbols

RING, WHEEL = "toy.ring:ring", "toy.ring:Wheel"
TESTS = """
@pytest.mark.verifies("toy.ring:ring", "toy.ring:Wheel")
def test_ring():
    pass
"""


@pytest.fixture
def built(toy, monkeypatch):
    """A checkout where the tests have run and the pages were built."""
    monkeypatch.setattr(kept, "asked", {})
    folder = toy.root / "docs/data/verification"
    monkeypatch.setattr(config, "COMMITTED_RECORDS", folder)
    toy.write("tests/test_ring.py", TESTS)
    toy.record(RING)
    build("ring")
    return toy


def build(*names):
    kept.asked.clear()
    for name in names:
        roots = [symbols.module_path("toy.ring")]
        kept.remembered("toys", name, roots, lambda: "seen")
    kept.note_asked()


def toys():
    return kept.shelf(kept.committed() / "toys.json")


def proved_there():
    """What the committed record says of each symbol."""
    return by_symbol(record.records()[0].good())


def test_what_is_recorded_is_of_this_code(built, capsys):
    assert record.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "toys: ring is missing or old" in out
    assert "toy.ring:ring, committed: no passing test on its current code" in out
    assert "run make record and commit docs/data" in out
    assert record.main([]) == 0
    assert record.main(["--check"]) == 0
    assert toys().good()["ring"].value == "seen"


def test_a_second_record_changes_nothing(built, capsys):
    record.main([])
    files = sorted((built.root / "docs/data").rglob("*.json"))
    assert len(files) == 2
    before = [path.read_text() for path in files]
    built.record(RING, seconds=9.9)
    capsys.readouterr()
    assert record.main([]) == 0
    assert capsys.readouterr().out == "what is committed is of this code\n"
    assert [path.read_text() for path in files] == before


@pytest.mark.parametrize("file", ["src/toy/steps.py", "tests/test_ring.py"])
def test_changed_code_makes_the_record_stale(built, file):
    record.main([])
    path = built.root / file
    path.write_text(path.read_text() + "# a word\n")
    assert record.main(["--check"]) == 1
    built.record(RING)
    build("ring")
    assert record.main(["--check"]) == 1
    assert record.main([]) == 0
    assert record.main(["--check"]) == 0


@pytest.mark.parametrize("file", ["kept/toys.json", "verification/gloo-cpu.json"])
@pytest.mark.parametrize("part", ["key", "torch"])
def test_a_tampered_record_is_refused(built, file, part):
    record.main([])
    store = kept.shelf(built.root / "docs/data" / file)
    entries = store.read()
    changed = {name: replace(e, **{part: "0"}) for name, e in entries.items()}
    store.write(changed, store.about())
    assert record.main(["--check"]) == 1


def test_a_failure_here_or_there_is_no_record(built, capsys):
    record.main([])
    built.record(RING, outcome="failed")
    assert record.main(["--check"]) == 1
    assert "here: tests/test_ring.py::test_ring[4] failed" in capsys.readouterr().out
    record.main([])
    built.record(RING)
    assert record.main(["--check"]) == 1
    assert "committed: tests/test_ring.py" in capsys.readouterr().out


def test_what_no_page_asks_for_any_more_goes(built, capsys):
    record.main([])
    build("wheel")
    assert record.main(["--check"]) == 1
    assert "toys: ring is not needed" in capsys.readouterr().out
    record.main([])
    assert list(toys().read()) == ["wheel"]
    build()
    record.main([])
    assert not toys().path.exists()


def test_a_run_of_some_tests_keeps_what_is_known_of_the_others(built):
    record.main([])
    name = "tests/test_ring.py::test_ring"
    entry = entry_of(name, [WHEEL], built.root)
    entry = entry.with_value(value_of("passed", 1.0, {WHEEL: []}))
    here = record.records()[1]
    here.write({name: entry}, here.about())
    record.main([])
    assert proved_there().keys() == {RING, WHEEL}


def test_what_is_old_stays_and_proves_nothing_until_its_test_is_gone(built):
    record.main([])
    path = built.root / "src/toy/steps.py"
    path.write_text(path.read_text() + "# a word\n")
    committed, here = record.records()
    here.write({}, here.about())
    record.main([])
    assert len(committed.read()) == 2  # their seconds choose the quick tier
    assert proved_there() == {}
    build("ring")
    record.main([])
    assert record.main(["--check"]) == 1
    built.write("tests/test_ring.py", TESTS.replace("toy.ring:ring", "toy.ring:Wheel"))
    assert record.main(["--check"]) == 0  # no test is about ring any more
    built.write("tests/test_ring.py", TESTS.replace("def test_ring", "def test_wheel"))
    record.main([])
    assert committed.read() == {}


def test_what_did_not_run_the_symbol_proves_nothing(built, capsys):
    built.record(RING, ran=False)
    record.main([])
    assert proved_there() == {}
    built.record(RING)
    assert record.main(["--check"]) == 1
    assert "committed: no passing test on its current code" in capsys.readouterr().out


def test_a_test_without_its_mark_is_forgotten(built):
    record.main([])
    assert proved_there().keys() == {RING}
    # Another file has the mark now; the first still passes, and says nothing of it.
    built.write("tests/test_ring.py", TESTS.replace('"toy.ring:ring", ', ""))
    built.record(WHEEL)
    record.main([])
    assert proved_there().keys() == {WHEEL}


def test_without_a_build_or_a_run_it_says_what_to_do(toy, monkeypatch):
    monkeypatch.setattr(kept, "asked", {})
    with pytest.raises(SystemExit, match="run make build"):
        record.main(["--check"])
    kept.note_asked()
    with pytest.raises(SystemExit, match="run make test"):
        record.main(["--check"])


# --- what is committed here ----------------------------------------------------------


def of_this_torch(entries):
    """Evidence is of one torch; with another there is nothing to compare."""
    found = {name: e for name, e in entries.items() if e.torch == torch_minor()}
    return found or pytest.skip("recorded with another torch")


def test_the_committed_record_is_of_this_code():
    committed = record.records()[0]
    of_this_torch(committed.read())
    proved = by_symbol(committed.good())
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    old = [s for s in marked if not any(test.passed for test in proved.get(s, ()))]
    assert old == [], "run make record and commit docs/data"


def test_the_committed_results_are_of_this_code():
    shelves = [kept.shelf(path) for path in sorted(kept.committed().glob("*.json"))]
    old = {
        (shelf.path.stem, name)
        for shelf in shelves
        for name in of_this_torch(shelf.read()).keys() - shelf.good().keys()
    }
    assert old == set(), "run make record and commit docs/data"
