"""What the tests have proved: reads the records that test runs write."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from xtrain.testing.record import SCHEMA, current

from . import config, symbols


class UnverifiedError(ValueError):
    """A page shows code that no passing test has verified as it stands."""


@dataclass(frozen=True)
class Evidence:
    """Tests of one symbol in one record that are all current, or all not."""

    symbol: str
    backend: str
    device: str
    created: str
    torch: str
    platform: str
    tests: tuple[dict, ...]

    @property
    def passed(self) -> list[dict]:
        """The tests that passed."""
        return [test for test in self.tests if test["outcome"] == "passed"]

    @property
    def failed(self) -> list[dict]:
        """The tests that failed."""
        return [t for t in self.tests if t["outcome"] in ("failed", "error")]

    @property
    def day(self) -> str:
        """The day of the run, as 2026-11-21."""
        return self.created[:10]


@dataclass
class Summary:
    """All current evidence for one symbol."""

    symbol: str
    current: list[Evidence] = field(default_factory=list)
    stale: list[Evidence] = field(default_factory=list)

    @property
    def passed(self) -> int:
        """How many different tests pass on the current source."""
        return len({t["id"] for e in self.current for t in e.passed})

    @property
    def failed(self) -> list[str]:
        """Tests that fail on the current source."""
        return sorted({t["id"] for e in self.current for t in e.failed})

    @property
    def verified(self) -> bool:
        """At least one test passes and none fails."""
        return self.passed > 0 and not self.failed

    @property
    def places(self) -> list[str]:
        """Where ranks ran it: `gloo on cpu` ...; none for what no rank has to run."""
        return sorted(
            {
                f"{backend} on {evidence.device}"
                for evidence in self.current
                for test in evidence.passed
                for backend, _ in test["places"]
            }
        )

    @property
    def world_sizes(self) -> list[int]:
        """The world sizes the passing tests ran at."""
        return sorted(
            {
                size
                for evidence in self.current
                for test in evidence.passed
                for _, size in test["places"]
            }
        )

    @property
    def day(self) -> str:
        """The latest day among the current evidence."""
        return max((e.day for e in self.current if e.passed), default="")


def read_records(folders: tuple[Path, ...] | None = None) -> list[dict]:
    """Every record file, oldest first. An unreadable one stops the build."""
    records = []
    for folder in folders if folders is not None else config.RECORDS:
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text())
            if record.get("schema") != SCHEMA:
                raise UnverifiedError(f"{path} is not a record of schema {SCHEMA}")
            records.append(record)
    return sorted(records, key=lambda record: record["created"])


class Ledger:
    """All records together, looked up by symbol."""

    def __init__(self, folders: tuple[Path, ...] | None = None) -> None:
        self.current: dict[str, list[Evidence]] = {}
        self.stale: dict[str, list[Evidence]] = {}
        for record in read_records(folders):
            self._add(record)

    def _add(self, record: dict) -> None:
        about = (record["backend"], record["device"], record["created"],
                 record["torch"], record.get("platform", ""))  # fmt: skip
        good = current(record, config.ROOT)
        for symbol, entry in record["symbols"].items():
            tests = good.get(symbol, [])
            old = [test for test in entry["tests"] if test not in tests]
            for kind, found in ((self.current, tests), (self.stale, old)):
                if found:
                    evidence = Evidence(symbol, *about, tuple(found))
                    kind.setdefault(symbol, []).append(evidence)

    def symbols(self) -> list[str]:
        """Every symbol that some record mentions."""
        return sorted({*self.current, *self.stale})

    def summary(self, key: str, root: Path | None = None) -> Summary:
        """The evidence for `module:name`, split into current and stale."""
        symbols.key_digest(key, root)  # SymbolError where there is no such symbol
        return Summary(key, self.current.get(key, []), self.stale.get(key, []))

    def summary_or_none(self, key: str) -> Summary | None:
        """The summary, or None where the symbol no longer exists."""
        try:
            return self.summary(key)
        except symbols.SymbolError:
            return None


_cache: dict[tuple, Ledger] = {}


def ledger() -> Ledger:
    """The ledger of the configured folders, read again when a file changes."""
    stamp = tuple(
        (str(path), path.stat().st_mtime_ns)
        for folder in config.RECORDS
        for path in sorted(folder.glob("*.json"))
    )
    if stamp not in _cache:
        _cache.clear()
        _cache[stamp] = Ledger(config.RECORDS)
    return _cache[stamp]


def check(key: str, root: Path | None = None) -> Summary:
    """The summary of a verified symbol, or UnverifiedError with what to do."""
    summary = ledger().summary(key, root)
    if summary.verified:
        return summary
    if summary.failed:
        why = f"{summary.failed[0]} fails"
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
