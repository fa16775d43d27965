"""`python -m xtrain_docs.stale`: does `make site` have to run tests first?"""

from dataclasses import replace

import pytest

pytest.importorskip("mkdocs", reason="the docs extra is not installed")


from xtrain.evidence.results import entry_of, value_of
from xtrain.evidence.store import Store
from xtrain_docs import authored, config, stale

SYMBOL = "xtrain.plan.traffic:ceil_log2"
TEST = "tests/t.py::t"


def record(folder, outcome="passed", **changes):
    entry = entry_of(TEST, [SYMBOL], config.ROOT)
    entry = replace(entry, value=value_of(outcome, 0, {SYMBOL: []}), **changes)
    about = {"backend": "gloo", "device": "cpu", "created": "2026-11-21T10:00:00"}
    Store(folder / "gloo-cpu.json", config.ROOT).write({TEST: entry}, about)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """An empty folder of records, and a site whose pages embed one symbol."""
    monkeypatch.setattr(config, "RECORDS", (tmp_path,))
    monkeypatch.setattr(authored, "embedded", lambda: {SYMBOL: []})
    monkeypatch.setattr(stale, "TABLES", ())
    return tmp_path


def test_without_a_record_the_tests_must_run(records, capsys):
    assert stale.main() == 1
    assert SYMBOL in capsys.readouterr().out


def test_with_a_current_record_they_need_not(records, capsys):
    record(records)
    assert stale.main() == 0
    assert capsys.readouterr().out == ""


def test_all_files_are_those_of_marked_tests_without_a_result(
    records, monkeypatch, capsys
):
    marked = {
        SYMBOL: {"tests/t.py::t", "tests/u.py::u"},
        "xtrain.plan.cost:Cost": set(),
    }
    monkeypatch.setattr(stale, "marked_tests", lambda *folders: marked)
    assert stale.main(["--all"]) == 0
    assert capsys.readouterr().out == "tests/t.py\ntests/u.py\n"
    record(records)
    assert stale.main(["--all"]) == 0
    assert capsys.readouterr().out == "tests/u.py\n"
    record(records, torch="1.0")
    assert stale.main(["--all"]) == 0
    assert capsys.readouterr().out == "tests/t.py\ntests/u.py\n"


@pytest.mark.parametrize(
    "changes",
    [{"key": "0" * 16}, {"outcome": "failed"}, {"torch": "1.0.0"}],
    ids=["the code has changed", "the test fails", "another torch"],
)
def test_otherwise_they_must(records, changes):
    record(records, **changes)
    assert stale.main() == 1
