"""Collects results for the verification record while pytest runs.

The facts travel on the test reports, which pytest-xdist carries from its workers to
the process that writes the record; without xdist both are the same process.
"""

import platform
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
import torch

from xtrain.testing import record
from xtrain.testing.executed import Seen, watching
from xtrain.testing.marks import marked_tests
from xtrain.testing.placement import Choice, Machine
from xtrain.testing.source import digest

_PROOFS = "xtrain verifies"
_MARKED = pytest.StashKey[dict[str, tuple[str, str]]]()
_SEEN = pytest.StashKey[Seen]()
_WRONG = pytest.StashKey[str]()


class Recorder:
    """A pytest plugin object: reads the marks, gathers reports, writes the file."""

    def __init__(self, config: pytest.Config, choice: Choice, machine: Machine) -> None:
        self.root = config.rootpath
        self.tests = [self.root / path for path in config.getini("testpaths") or ["."]]
        self.choice = choice
        self.machine = machine
        self.writes = not hasattr(config, "workerinput")
        self.results: dict[str, record.Result] = {}
        self.phases: dict[str, tuple[str, float]] = {}
        self.skipped: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Digest the symbols right after their modules were imported."""
        digests: dict[tuple[str, str], tuple[str, str]] = {}

        def digests_of(file: str, symbol: str) -> tuple[str, str]:
            key = file, symbol
            if key not in digests:
                stamp = record.stamp_of(file, symbol, self.root)
                digests[key] = digest(symbol), stamp
            return digests[key]

        for item in items:
            symbols = {s for m in item.iter_markers("verifies") for s in m.args}
            if not symbols:
                continue
            file = item.nodeid.partition("::")[0]
            try:
                marked = {
                    symbol: digests_of(file, symbol) for symbol in sorted(symbols)
                }
                item.stash[_MARKED] = marked
            except ValueError as error:
                item.stash[_WRONG] = str(error)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Watch what a test runs, its fixtures included."""
        marked: dict[str, tuple[str, str]] = item.stash.get(_MARKED, {})
        with watching(marked) as seen:
            item.stash[_SEEN] = seen
            return (yield)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that claims to verify what does not exist must not pass."""
        if _WRONG in item.stash:
            pytest.fail(f"verifies: {item.stash[_WRONG]}", pytrace=False)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note for every marked symbol where the test has run it, if it has."""
        if _MARKED in item.stash:
            places = item.stash[_SEEN].places
            proofs = {
                symbol: (*digests, sorted(places[symbol]) if symbol in places else None)
                for symbol, digests in item.stash[_MARKED].items()
            }
            item.user_properties.append((_PROOFS, proofs))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test: setup, call or teardown."""
        if not self.writes:
            return
        before, seconds = self.phases.get(report.nodeid, ("passed", 0.0))
        outcomes = (report.outcome, before)
        worst = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        seconds += report.duration if report.when == "call" else 0.0
        self.phases[report.nodeid] = worst, seconds
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        proofs: Any = dict(report.user_properties).get(_PROOFS)
        if proofs:  # the teardown's report has them, the last of the three
            self.results[report.nodeid] = record.Result(
                report.nodeid, worst, proofs, seconds
            )

    def pytest_sessionfinish(self) -> None:
        """Write what was seen; a run without verifying tests writes nothing."""
        if not self.results:
            return
        choice = self.choice
        head = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": self._platform(),
            "backend": choice.backend,
            "device": choice.device,
            "ran": dict(Counter(worst for worst, _ in self.phases.values())),
            "skipped": dict(self.skipped.most_common()),
        }
        marked: dict[str, set[str]] = {}
        for folder in self.tests:
            for symbol, names in marked_tests(folder, self.root).items():
                marked.setdefault(symbol, set()).update(names)
        path = (
            self.root / "build/verification" / f"{choice.backend}-{choice.device}.json"
        )
        record.update(path, head, self.results.values(), marked, self.root)

    def _platform(self) -> str:
        parts = [f"{platform.system()} {platform.machine()}"]
        if self.choice.device == "cuda":
            name = torch.cuda.get_device_name(0)
            parts.append(f"{self.machine.gpus} x {name}")
        if self.choice.backend == "nccl" and self.machine.nccl:
            parts.append("NCCL " + ".".join(map(str, self.machine.nccl)))
        return ", ".join(parts)
