"""`make record`: what is committed is what this code gave, and CI refuses the rest."""

import json
from functools import cache

import pytest

from xtrain.evidence.marks import marked_tests
from xtrain.testing.record import SCHEMA, read, stamp_of
from xtrain_docs import config, kept, record, stale, symbols, transcripts

RING, WHEEL = "toy.ring:ring", "toy.ring:Wheel"
TESTS = """
@pytest.mark.verifies("toy.ring:ring", "toy.ring:Wheel")
def test_ring():
    pass
"""


@pytest.fixture
def built(toy, monkeypatch):
    """A checkout where the tests have run and the pages were built."""
    monkeypatch.setattr(kept, "used", {})
    folder = toy.root / "docs/data/verification"
    monkeypatch.setattr(config, "COMMITTED_RECORDS", folder)
    toy.write("tests/test_ring.py", TESTS)
    toy.record(RING)
    build(toy, "ring")
    return toy


def build(toy, *asked):
    kept.used.clear()
    for name in asked:
        now = kept.stamp([symbols.module_path("toy.ring")])
        kept.remembered("toys", name, now, lambda: "seen")
    kept.note_used()


def test_what_is_recorded_is_of_this_code(built, capsys):
    assert record.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "toys: ring is missing" in out
    assert "toy.ring:ring, committed: no test proves it as it stands" in out
    assert "run make record and commit docs/data" in out
    assert record.main([]) == 0
    assert record.main(["--check"]) == 0
    assert kept.read(kept.committed() / "toys.json")["ring"]["result"] == "seen"


def test_a_second_record_changes_nothing(built, capsys):
    record.main([])
    files = sorted((built.root / "docs/data").rglob("*.json"))
    assert len(files) == 2
    before = [path.read_text() for path in files]
    rerun = json.loads((config.BUILD / "verification/gloo-cpu.json").read_text())
    rerun["created"] = "2027-01-01T00:00:00+00:00"
    for test in rerun["symbols"][RING]["tests"]:
        test["seconds"] = 9.9
    built.write("build/verification/gloo-cpu.json", json.dumps(rerun))
    capsys.readouterr()
    assert record.main([]) == 0
    assert capsys.readouterr().out == "what is committed is of this code\n"
    assert [path.read_text() for path in files] == before


@pytest.mark.parametrize("file", ["src/toy/steps.py", "tests/test_ring.py"])
def test_changed_code_makes_the_record_stale(built, file):
    record.main([])
    path = built.root / file
    path.write_text(path.read_text() + "# a word\n")
    built.record(RING)
    build(built, "ring")
    assert record.main(["--check"]) == 1
    assert record.main([]) == 0
    assert record.main(["--check"]) == 0


def test_a_failure_here_or_there_is_no_record(built, capsys):
    record.main([])
    built.record(RING, outcome="failed")
    assert record.main(["--check"]) == 1
    assert "here: tests/test_ring.py::test_ring[1] failed" in capsys.readouterr().out
    record.main([])
    built.record(RING)
    assert record.main(["--check"]) == 1
    assert "committed: tests/test_ring.py" in capsys.readouterr().out


def test_what_no_page_asks_for_any_more_goes(built):
    record.main([])
    build(built, "wheel")
    assert record.main(["--check"]) == 1
    record.main([])
    assert list(kept.read(kept.committed() / "toys.json")) == ["wheel"]
    kept.used.clear()
    kept.note_used()
    record.main([])
    assert not (kept.committed() / "toys.json").exists()


def test_a_run_of_some_tests_keeps_what_is_known_of_the_others(built):
    record.main([])
    stamp = stamp_of("tests/test_ring.py", WHEEL, built.root)
    test = {"id": "tests/test_ring.py::test_ring", "outcome": "passed",
            "stamp": stamp, "places": [], "seconds": 1.0}  # fmt: skip
    entry = {"digest": symbols.key_digest(WHEEL), "tests": [test]}
    partial = {"schema": SCHEMA, "created": "2027-01-01", "symbols": {WHEEL: entry}}
    built.write("build/verification/gloo-cpu.json", json.dumps(partial))
    record.main([])
    path = config.COMMITTED_RECORDS / "gloo-cpu.json"
    assert json.loads(path.read_text())["symbols"].keys() == {RING, WHEEL}


def test_a_committed_record_has_a_line_for_each_test(built):
    record.main([])
    path = config.COMMITTED_RECORDS / "gloo-cpu.json"
    text = path.read_text()
    whole = json.loads((config.BUILD / "verification/gloo-cpu.json").read_text())
    assert json.loads(text) == whole
    assert [line.count('"id"') for line in text.splitlines()].count(1) == 2


def test_what_did_not_run_the_symbol_is_not_committed(built):
    built.record(RING, outcome="unused")
    record.main([])
    assert not (config.COMMITTED_RECORDS / "gloo-cpu.json").is_file()


def test_a_test_without_its_mark_is_forgotten(built):
    record.main([])
    # Another file has the mark now; the first still passes, and says nothing of it.
    built.write("tests/test_ring.py", TESTS.replace('"toy.ring:ring", ', ""))
    built.record(RING)
    record.main([])
    path = config.COMMITTED_RECORDS / "gloo-cpu.json"
    assert json.loads(path.read_text())["symbols"] == {}


def test_without_a_build_or_a_run_it_says_what_to_do(toy, monkeypatch):
    monkeypatch.setattr(kept, "used", {})
    with pytest.raises(SystemExit, match="run make build"):
        record.main(["--check"])
    kept.note_used()
    with pytest.raises(SystemExit, match="run make test"):
        record.main(["--check"])


# --- what is committed here ----------------------------------------------------------

OF_THIS_CODE = "run make record and commit docs/data"


@pytest.fixture
def same_torch():
    """Evidence is of one torch; with another there is nothing to compare."""
    recorded = read(config.COMMITTED_RECORDS / record.NAME)["torch"]
    if stale.minor(recorded) != kept.closure.torch_minor():
        pytest.skip(f"recorded with torch {recorded}")


@pytest.mark.usefixtures("same_torch")
def test_the_committed_record_is_of_this_code():
    ended = record.outcomes(read(config.COMMITTED_RECORDS / record.NAME))
    marked = marked_tests(config.ROOT / "tests", config.ROOT)
    old = [s for s in marked if "passed" not in ended.get(s, {}).values()]
    assert old == [], OF_THIS_CODE


@cache
def stamp_now(shelf: str, of: str) -> str:
    """The stamp of a snippet's output, or of what a module's functions gave."""
    if shelf == "transcripts":
        return transcripts.stamp(config.ROOT / of)
    roots = [symbols.module_path(of)]
    if shelf == "traces":
        roots.insert(0, symbols.module_path("xtrain_docs.traces.record"))
    return kept.stamp(roots)


def source_of(shelf: str, asked: str) -> str:
    return asked if shelf == "transcripts" else json.loads(asked)[0].partition(":")[0]


@pytest.mark.usefixtures("same_torch")
def test_the_committed_results_are_of_this_code():
    old = [
        (path.stem, asked)
        for path in sorted(kept.committed().glob("*.json"))
        for asked, entry in kept.read(path).items()
        if entry["stamp"] != stamp_now(path.stem, source_of(path.stem, asked))
    ]
    assert old == [], OF_THIS_CODE
