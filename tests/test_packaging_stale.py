"""`python -m xtrain_docs.stale`: does `make site` have to run tests first?"""

import json
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the docs extra is not installed")

from xtrain_docs import authored, config, stale, symbols

SYMBOL = "xtrain.plan.traffic:ceil_log2"


def record(digest: str, outcome: str = "passed") -> dict:
    test = {"id": "tests/t.py::t", "outcome": outcome, "world_sizes": [2], "seconds": 0}
    return {
        "schema": 1,
        "created": "2026-11-21T10:00:00",
        "torch": "2.13.0",
        "python": "3.11.7",
        "platform": "here",
        "backend": "gloo",
        "device": "cpu",
        "symbols": {SYMBOL: {"digest": digest, "tests": [test]}},
    }


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records, and a site whose pages embed one symbol."""
    monkeypatch.setattr(config, "RECORDS", (tmp_path,))
    monkeypatch.setattr(authored, "embedded", lambda: {SYMBOL: []})
    return tmp_path


def test_without_a_record_the_tests_must_run(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stale.main() == 1
    assert SYMBOL in capsys.readouterr().out


def test_with_a_current_record_they_need_not(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    current = record(symbols.key_digest(SYMBOL))
    (records / "gloo-cpu.json").write_text(json.dumps(current))
    assert stale.main() == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("why", ["the code has changed", "the test fails"])
def test_otherwise_they_must(records: Path, why: str) -> None:
    digest = "0" * 64 if "changed" in why else symbols.key_digest(SYMBOL)
    outcome = "failed" if "fails" in why else "passed"
    (records / "gloo-cpu.json").write_text(json.dumps(record(digest, outcome)))
    assert stale.main() == 1
