"""Collects the results of tests that carry `verifies` while pytest runs.

The facts travel on the test reports, which pytest-xdist carries from its workers to
the process that writes the store; without xdist both are the same process.
"""

from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any

import pytest

from xtrain.evidence import results
from xtrain.evidence.closure import steady
from xtrain.evidence.executed import Seen, watching
from xtrain.evidence.store import Entries, Entry, Store

_RAN = "xtrain verifies"
_MARKED = pytest.StashKey[tuple[list[str], Entry]]()
_SEEN = pytest.StashKey[Seen]()
_WRONG = pytest.StashKey[str]()


class Recorder:
    """A pytest plugin object: reads the marks, gathers reports, writes the file.

    Args:
        about: called at the end: what to note of the whole run, `backend` and `device`
            among it.
    """

    def __init__(
        self, config: pytest.Config, about: Callable[[], dict[str, Any]]
    ) -> None:
        self.root = config.rootpath
        self.about = about
        self.writes = not hasattr(config, "workerinput")
        self.entries: Entries = {}
        self.phases: dict[str, tuple[str, float]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Digest the code right after it was imported."""
        with steady():
            for item in items:
                marks = item.iter_markers("verifies")
                if not (symbols := sorted({s for mark in marks for s in mark.args})):
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

    def pytest_sessionfinish(self) -> None:
        """Write what was seen; a run without verifying tests writes nothing."""
        if not self.entries:
            return
        about = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.about(),
        }
        name = f"{about['backend']}-{about['device']}.json"
        path = self.root / "build" / results.FOLDER / name
        Store(path, self.root).put(self.entries, about)
