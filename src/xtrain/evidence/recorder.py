"""Collects the results of tests that carry `verifies` while pytest runs.

The facts travel on the test reports, which pytest-xdist carries from its workers to
the process that writes the store; without xdist both are the same process.
"""

import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from xtrain.evidence import results
from xtrain.evidence.closure import steady
from xtrain.evidence.executed import Seen, watching
from xtrain.evidence.store import Entries, Entry, Store

WRITE_SECONDS = 30.0  # between two writes, where a run may be cut
_RAN = "xtrain verifies"
_MARKED = pytest.StashKey[tuple[list[str], Entry]]()
_SEEN = pytest.StashKey[Seen]()
_WRONG = pytest.StashKey[str]()


class Recorder:
    """A pytest plugin object: reads the marks, gathers reports, writes the file.

    Args:
        path: where the record is written: below build/, if relative.
        about: called at the end: what to note of the whole run, `backend` and `device`
            among it.
        every: record tests without a mark, too, and write while the run goes on, so
            that a later one can go on from there.
    """

    def __init__(
        self,
        config: pytest.Config,
        path: Path,
        about: Callable[[], dict[str, Any]],
        every: bool = False,
    ) -> None:
        self.root = config.rootpath
        self.store = Store(self.root / "build" / path, self.root)
        self.about = about
        self.every = every
        self.written = time.monotonic()
        self.writes = not hasattr(config, "workerinput")
        self.entries: Entries = {}
        self.phases: dict[str, tuple[str, float]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Digest the code of what is going to run, right after it was imported."""
        with steady():
            for item in items:
                marks = item.iter_markers("verifies")
                symbols = sorted({s for mark in marks for s in mark.args})
                if not symbols and not self.every:
                    continue
                try:
                    entry = results.entry_of(item.nodeid, symbols, self.root)
                    item.stash[_MARKED] = symbols, entry
                except ValueError as error:
                    item.stash[_WRONG] = str(error)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Watch what a test runs, its fixtures included."""
        symbols = item.stash[_MARKED][0] if _MARKED in item.stash else []
        with watching(symbols) as seen:
            item.stash[_SEEN] = seen
            return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that claims to verify what does not exist must not pass."""
        if _WRONG in item.stash:
            pytest.fail(f"verifies: {item.stash[_WRONG]}", pytrace=False)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note for every marked symbol where the test has run it, if it has."""
        if _MARKED in item.stash:
            symbols, entry = item.stash[_MARKED]
            places = item.stash[_SEEN].places
            ran = {s: sorted(places[s]) if s in places else None for s in symbols}
            facts = (entry.key, entry.torch, entry.roots, ran)
            item.user_properties.append((_RAN, facts))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test: setup, call or teardown."""
        if not self.writes:
            return
        before, seconds = self.phases.get(report.nodeid, ("passed", 0.0))
        outcomes = (report.outcome, before)
        worst = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        seconds += report.duration if report.when == "call" else 0.0
        self.phases[report.nodeid] = worst, seconds
        facts: Any = dict(report.user_properties).get(_RAN)
        if facts:  # the teardown's report has them, the last of the three
            key, torch, roots, ran = facts
            value = results.value_of(worst, seconds, ran)
            entry = Entry(key, torch, tuple(roots)).with_value(value)
            self.entries[report.nodeid] = entry
        if self.every and time.monotonic() > self.written + WRITE_SECONDS:
            self.pytest_sessionfinish()

    def pytest_sessionfinish(self) -> None:
        """Write what was seen; a run without verifying tests writes nothing."""
        if not self.entries:
            return
        about = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.about(),
        }
        self.store.put(self.entries, about)
        self.written = time.monotonic()
