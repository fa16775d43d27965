"""Collects results for the verification record while pytest runs.

The facts travel on the test reports, which pytest-xdist carries from its workers to
the process that writes the record; without xdist both are the same process.
"""

import platform
from typing import Any

import pytest
import torch

from xtrain.testing import record
from xtrain.testing.marks import marked_tests
from xtrain.testing.placement import Choice, Machine
from xtrain.testing.source import digest

_SYMBOLS = "xtrain verifies"
_SIZES = "xtrain world sizes"
_WRONG = pytest.StashKey[str]()


def note_world(node: pytest.Item, size: int) -> None:
    """Remember that the running test used a world of this size."""
    sizes: Any = dict(node.user_properties).get(_SIZES)
    if sizes is None:
        sizes = []
        node.user_properties.append((_SIZES, sizes))
    if size not in sizes:
        sizes.append(size)


class Recorder:
    """A pytest plugin object: reads the marks, gathers reports, writes the file."""

    def __init__(self, config: pytest.Config, choice: Choice, machine: Machine) -> None:
        self.root = config.rootpath
        self.tests = [self.root / path for path in config.getini("testpaths") or ["."]]
        self.choice = choice
        self.machine = machine
        self.writes = not hasattr(config, "workerinput")
        self.results: dict[str, record.Result] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Digest the symbols right after their modules were imported."""
        for item in items:
            symbols = {s for m in item.iter_markers("verifies") for s in m.args}
            if not symbols:
                continue
            try:
                digests = {symbol: digest(symbol) for symbol in sorted(symbols)}
                item.user_properties.append((_SYMBOLS, digests))
            except ValueError as error:
                item.stash[_WRONG] = str(error)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that claims to verify what does not exist must not pass."""
        if _WRONG in item.stash:
            pytest.fail(f"verifies: {item.stash[_WRONG]}", pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test: setup, call or teardown."""
        facts: dict[str, Any] = dict(report.user_properties)
        if not self.writes or _SYMBOLS not in facts:
            return
        before = self.results.get(report.nodeid)
        outcomes = {report.outcome, before.outcome if before else "passed"}
        worst = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        self.results[report.nodeid] = record.Result(
            id=report.nodeid,
            outcome=worst,
            verifies=facts[_SYMBOLS],
            world_sizes=sorted(facts.get(_SIZES, [])),
            seconds=(before.seconds if before else 0.0)
            + (report.duration if report.when == "call" else 0.0),
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
        }
        marked: dict[str, set[str]] = {}
        for folder in self.tests:
            for symbol, names in marked_tests(folder, self.root).items():
                marked.setdefault(symbol, set()).update(names)
        path = (
            self.root / "build/verification" / f"{choice.backend}-{choice.device}.json"
        )
        record.update(path, head, self.results.values(), marked)

    def _platform(self) -> str:
        parts = [platform.platform()]
        if self.choice.device == "cuda":
            name = torch.cuda.get_device_name(0)
            parts.append(f"{self.machine.gpus} x {name}")
        if self.choice.backend == "nccl" and self.machine.nccl:
            parts.append("NCCL " + ".".join(map(str, self.machine.nccl)))
        return ", ".join(parts)
