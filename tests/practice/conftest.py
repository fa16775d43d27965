"""One process that runs files on virtual ranks, for all tests here."""

from collections.abc import Iterator

import pytest

from xtrain.practice.checking import Process


@pytest.fixture(scope="package")
def process() -> Iterator[Process]:
    with Process() as running:
        yield running


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """No test touches what a reader has solved."""
    monkeypatch.setenv("XTRAIN_STATE", str(tmp_path / "state"))
    return tmp_path / "state"
