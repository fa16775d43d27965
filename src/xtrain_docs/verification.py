"""What the tests have proved: reads the records that test runs write."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from . import config, symbols


class UnverifiedError(ValueError):
    """A page shows code that no passing test has verified as it stands."""


@dataclass(frozen=True)
class Evidence:
    """The tests of one symbol in one record, for one digest of its source."""

    symbol: str
    backend: str
    device: str
    created: str
    torch: str
    platform: str
    digest: str
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
        """Where it ran: `gloo on cpu` ..."""
        ran = Counter((e.backend, e.device) for e in self.current if e.passed)
        return [f"{backend} on {device}" for backend, device in sorted(ran)]

    @property
    def world_sizes(self) -> list[int]:
        """The world sizes the passing tests ran at."""
        return sorted(
            {
                size
                for evidence in self.current
                for test in evidence.passed
                for size in test.get("world_sizes") or ()
            }
        )

    @property
    def day(self) -> str:
        """The latest day among the current evidence."""
        return max((e.day for e in self.current if e.passed), default="")

    def seconds(self, test: str) -> float:
        """The longest time a test took."""
        return max(
            (t.get("seconds") or 0.0)
            for e in self.current
            for t in e.tests
            if t["id"] == test
        )


def read_records(folders: tuple[Path, ...] | None = None) -> list[dict]:
    """Every record file, oldest first. An unreadable one stops the build."""
    records = []
    for folder in folders if folders is not None else config.RECORDS:
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text())
            if record.get("schema") != 1:
                raise UnverifiedError(f"{path} is not a record of schema 1")
            records.append(record)
    return sorted(records, key=lambda record: record["created"])


def evidence(record: dict) -> list[Evidence]:
    """The evidence in one record."""
    return [
        Evidence(
            symbol,
            record["backend"],
            record["device"],
            record["created"],
            record["torch"],
            record.get("platform", ""),
            entry["digest"],
            tuple(entry["tests"]),
        )
        for symbol, entry in record["symbols"].items()
    ]


class Ledger:
    """All records together, looked up by symbol."""

    def __init__(self, folders: tuple[Path, ...] | None = None) -> None:
        self.evidence = [e for r in read_records(folders) for e in evidence(r)]

    def symbols(self) -> list[str]:
        """Every symbol that some record mentions."""
        return sorted({e.symbol for e in self.evidence})

    def summary(self, key: str, root: Path | None = None) -> Summary:
        """The evidence for `module:name`, split into current and stale."""
        now = symbols.key_digest(key, root)
        summary = Summary(key)
        for item in self.evidence:
            if item.symbol == key:
                current = item.digest == now
                (summary.current if current else summary.stale).append(item)
        return summary

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
        why = "its source has changed since the recorded test run"
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
