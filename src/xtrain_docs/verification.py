"""What the tests have proved: reads the records that test runs write."""

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from xtrain.evidence import results
from xtrain.evidence.closure import steady, torch_minor
from xtrain.evidence.results import Result
from xtrain.evidence.store import Entries, Store

from . import config, symbols


class UnverifiedError(ValueError):
    """A page shows code without a passing test on its current source."""


@dataclass
class Summary:
    """All evidence for one symbol: of its current code, and of older code."""

    symbol: str
    current: list[Result] = field(default_factory=list)
    stale: list[Result] = field(default_factory=list)

    @property
    def good(self) -> list[Result]:
        """The tests that pass on the current source."""
        return [test for test in self.current if test.passed]

    @property
    def passed(self) -> int:
        """How many different tests pass on the current source."""
        return len({test.id for test in self.good})

    @property
    def failed(self) -> list[str]:
        """Tests that fail on the current source."""
        return sorted({test.id for test in self.current if test.outcome == "failed"})

    @property
    def verified(self) -> bool:
        """At least one test passes on the installed torch, and none fails."""
        return torch_minor() in {test.torch for test in self.good} and not self.failed

    @property
    def day(self) -> str:
        """The latest day among the current evidence."""
        return max((test.about["created"][:10] for test in self.good), default="")


class Ledger:
    """All records together, looked up by symbol."""

    def __init__(self, files: tuple[Path, ...] = ()) -> None:
        self.current: dict[str, list[Result]] = {}
        self.stale: dict[str, list[Result]] = {}
        self.abouts: list[dict[str, Any]] = []
        with steady():
            for file in files:
                self._add(Store(file, config.ROOT))

    def _add(self, store: Store) -> None:
        entries, about = store.read(), store.about()
        if not about:
            raise UnverifiedError(f"{store.path} is not a record of tests")
        self.abouts.append(about)
        ours: Entries = {n: e for n, e in entries.items() if e.is_of(config.ROOT)}
        old = {name: entries[name] for name in entries.keys() - ours.keys()}
        for kind, found in ((self.current, ours), (self.stale, old)):
            for symbol, tests in results.by_symbol(found, about).items():
                kind.setdefault(symbol, []).extend(tests)

    def summary(self, key: str) -> Summary:
        """The evidence for `module:name`, or SymbolError where there is none such."""
        symbols.resolve(key)
        return Summary(key, self.current.get(key, []), self.stale.get(key, []))

    def summaries(self, *also: str) -> list[Summary]:
        """Those of all recorded symbols that still exist, and of some more."""
        found = []
        for key in sorted({*self.current, *self.stale, *also}):
            with suppress(symbols.SymbolError):
                found.append(self.summary(key))
        return found


def ledger() -> Ledger:
    """The ledger of the configured folders, read again when a file changes."""
    files = [f for folder in config.RECORDS for f in sorted(folder.glob("*.json"))]
    return _ledger(tuple((file, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=1)
def _ledger(stamp: tuple[tuple[Path, int], ...]) -> Ledger:
    return Ledger(tuple(file for file, _ in stamp))


def check(key: str) -> Summary:
    """The summary of a verified symbol, or UnverifiedError with what to do."""
    summary = ledger().summary(key)
    if summary.verified:
        return summary
    if summary.failed:
        why = f"{summary.failed[0]} fails"
    elif summary.good:
        why = f"not tested on torch {torch_minor()}"
    elif summary.stale:
        why = "code has changed since the recorded test run"
    else:
        why = (
            f'no recorded test names it (mark one with @pytest.mark.verifies("{key}"))'
        )
    raise UnverifiedError(
        f"{key} is on a page but not verified: {why}. Run: {config.VERIFY_COMMAND}"
    )


def pretty_day(day: str) -> str:
    """2026-11-21 as 21 Nov 2026."""
    return f"{datetime.fromisoformat(day):%d %b %Y}".lstrip("0")
