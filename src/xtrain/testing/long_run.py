"""A pytest run that can be cut: what passed on the same code is not run again, what
proves most runs first, and when its time is over no further test starts.

`LongRun` is handed to pytest; `long_run_worker` follows its plan in the test processes.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from xtrain.evidence.forecast import Expected, seconds
from xtrain.evidence.store import Store
from xtrain.testing.progress import ProgressBar

SILENT_SECONDS = 60.0  # without a terminal
START_SHARE = 0.95  # of the time; what has started then may end in the rest


class LongRun:
    """The process that hands tests out and hears how they end.

    Args:
        store: results of earlier runs of the same kind, and of this one.
        known: what is expected of tests.
        times_longer: than that, by number of ranks; 0 where they are skipped.
        workers: test processes side by side.
        limit: seconds from now on.
    """

    def __init__(
        self,
        store: Store,
        known: dict[str, Expected],
        times_longer: Callable[[int], float],
        workers: int,
        limit: float,
    ) -> None:
        good = store.good()
        self.done = [n for n, e in good.items() if e.value["outcome"] == "passed"]
        self.known, self.times_longer, self.workers = known, times_longer, workers
        self.limit, self.began = limit, time.monotonic()
        self.progress: ProgressBar | None = None
        self.asked: set[str] = set()
        self.phases: dict[str, str] = {}  # also of tests that have not ended
        self.ended: dict[str, str] = {}
        self.finished = False
        self.told = 0.0
        self.alarm = threading.Timer(limit, os.kill, (os.getpid(), signal.SIGINT))
        self.alarm.daemon = True

    @property
    def over(self) -> bool:
        """Is its time over?"""
        return self.elapsed() > self.limit * START_SHARE

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.began

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Tests that hang beyond the limit are ended as by Ctrl-C."""
        plugins = session.config.pluginmanager
        self.terminal: Any = plugins.get_plugin("terminalreporter")
        self.alarm.start()

    def pytest_configure_node(self, node: Any) -> None:
        """The same plan for every test process, also for one that replaces another."""
        order = {n: (e.order, e.ranks) for n, e in self.known.items()}
        until = time.time() + self.limit * START_SHARE - self.elapsed()
        node.workerinput["plan"] = {"done": self.done, "order": order, "until": until}

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Say how much there is to do and how long it is thought to take."""
        if self.progress:
            return
        self.asked = set(ids)
        expected = seconds(ids, self.known, self.times_longer) / self.workers
        end = self.limit * START_SHARE
        self.progress = ProgressBar(len(ids), expected, end)
        minutes = max(1, round(expected / 60))
        words = f"{len(ids):,} tests to run, in about {minutes} min"
        if self.done:
            words += f"; {len(self.done):,} have passed on this code and are left out"
        if expected > end - self.elapsed():
            words += f"; this run ends after {self.limit / 60:g} min, the next goes on"
        self.terminal.write_line(words)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        """No letter for each test, there is the bar; the summary has words."""
        status = yield
        return status if self.finished else (status[0], "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count; name a test that failed, at once. A crash has no teardown."""
        if self.progress is None:
            return
        before = self.phases.get(report.nodeid, "passed")
        if report.failed and before != "failed":
            self.progress.failed += 1
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid}{reason(report)}")
        worst = next(
            o for o in ("failed", "skipped", "passed") if o in (before, report.outcome)
        )
        self.phases[report.nodeid] = worst
        if report.when in ("teardown", "???"):
            self.ended[report.nodeid] = worst
            self.progress.done += 1
            self._show(self.progress)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """The last words begin on a line of their own, and nothing cuts them off."""
        self.finished = True
        self.alarm.cancel()
        self.terminal.ensure_newline()

    def _show(self, progress: ProgressBar) -> None:
        if self.terminal.isatty:
            self.terminal.rewrite(progress.text(self.elapsed()), erase=True)
        elif progress.is_due() or self.elapsed() > self.told + SILENT_SECONDS:
            self.terminal.write_line(progress.text(self.elapsed()))
            self.told = self.elapsed()


def reason(report: pytest.TestReport) -> str:
    """The first line of what it failed with."""
    crash = getattr(report.longrepr, "reprcrash", None)
    words = crash.message if crash else str(report.longrepr or "")
    return f": {words.splitlines()[0]}" if words.strip() else ""
