"""A toy repository to plant defects in."""

from pathlib import Path

import pytest

from xtrain.evidence import results
from xtrain.evidence.closure import torch_minor
from xtrain.evidence.store import Store
from xtrain_docs import config, kept, runs, symbols, verification

RING = '''"""A toy ring."""

from toy.steps import shift
from toy.steps import fold as combine

STEPS = 2


def ring(values, times=STEPS):
    """Turn the values.

    In place.
    """
    for step in range(times):  # one turn each
        values[:] = shift(values)
    return combine(values)


class Wheel:
    """Turns."""

    def turn(self):
        return ring([1, 2])


def _hidden():
    return 0
'''
STEPS = """import math
from collections import deque


def shift(values):
    turned = deque(values)
    turned.rotate(1)
    return list(turned)


def fold(values):
    return math.fsum(values)
"""


class Toy:
    """Writes files, pages and records of the toy repository."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def record(
        self,
        key: str,
        outcome: str = "passed",
        *,
        backend: str = "gloo",
        places: list | None = None,
        ran: bool = True,
        seconds: float = 0.1,
    ) -> None:
        """A record in which two tests marked with `key` ended as given."""
        entries = {}
        for size in (1, 4):
            name = f"tests/test_ring.py::test_ring[{size}]"
            where = [[backend, size]] if places is None else places
            value = results.value_of(outcome, seconds, {key: where if ran else None})
            entry = results.entry_of(name, [key], self.root)
            entries[name] = entry.with_value(value)
        about = {
            "created": "2026-11-21T01:00:00+00:00",
            "torch": "2.13.0",
            "platform": "Linux",
            "backend": backend,
            "device": "cpu",
        }
        path = self.root / f"build/verification/{backend}-cpu.json"
        Store(path, self.root).write(entries, about)
        verification._ledger.cache_clear()


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Toy:
    """A repository of its own, with nothing verified yet."""
    repository = Toy(tmp_path)
    repository.write("src/toy/__init__.py", "from toy.ring import ring\n")
    repository.write("src/toy/ring.py", RING)
    repository.write("src/toy/steps.py", STEPS)
    repository.write("tests/test_ring.py", "\ndef test_ring():\n    pass\n")
    (tmp_path / "docs/en").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(config, "SOURCE", tmp_path / "src")
    monkeypatch.setattr(config, "PAGES", tmp_path / "docs/en")
    monkeypatch.setattr(config, "BUILD", tmp_path / "build")
    monkeypatch.setattr(config, "RECORDS", (tmp_path / "build/verification",))
    monkeypatch.delenv("XTRAIN_DOCS_DRAFT", raising=False)
    monkeypatch.delenv("XTRAIN_REPO_URL", raising=False)
    verification._ledger.cache_clear()
    yield repository
    verification._ledger.cache_clear()


@pytest.fixture
def pretend_verified(monkeypatch):
    """Every symbol counts as verified: the record may be what this run is making."""

    def check(key: str) -> verification.Summary:
        symbols.resolve(key)
        about = {"device": "cpu", "created": "2026-11-21"}
        test = results.Result("a", "passed", [("gloo", 4)], torch_minor(), about)
        return verification.Summary(key, [test])

    monkeypatch.setattr(verification, "check", check)


@pytest.fixture
def on_ranks(world, tmp_path, monkeypatch):
    """Runs happen on this session's ranks and are remembered for one test only."""
    if (world(2).device, world(2).backend) != ("cpu", "gloo"):
        pytest.skip("the pages' runs are made over gloo on CPUs")
    monkeypatch.setattr(runs, "_world", world)
    forget(monkeypatch, tmp_path)


@pytest.fixture
def nothing_kept(tmp_path, monkeypatch):
    """No earlier build has run anything; what this test runs is kept in a folder."""
    return forget(monkeypatch, tmp_path)


def forget(monkeypatch, folder):
    monkeypatch.setattr(kept, "local", lambda: folder)
    monkeypatch.setattr(kept, "committed", lambda: folder / "committed")
    return folder
