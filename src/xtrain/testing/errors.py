"""What went wrong on the ranks, as one exception in the parent.

    rank 0: returned   rank 1: ValueError   rank 2: waiting in recv(src=1)
                             |
    RankError: also a ValueError, message = one line per rank + rank 1's traceback

The type of the first failure is kept, so `pytest.raises(ValueError)` works on a
`World.run` as it does on a plain call.
"""

import contextlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankReport:
    """How one rank ended a run.

    `kind` is "returned", "raised", "died" (a signal or an exit) or "waiting" (still
    busy when the run was cut). `summary` is one line, `detail` the traceback, the
    Python stack, or what the rank wrote to stderr before it died. `at` orders
    failures in time.
    """

    rank: int
    kind: str
    summary: str = ""
    detail: str = ""
    exception: BaseException | None = None
    at: float = 0.0

    def line(self) -> str:
        """One line: the rank and what became of it."""
        text = (self.summary or self.kind).splitlines()[0]
        text = text if len(text) <= 200 else text[:197] + "..."
        return f"rank {self.rank}: {text}"


class RankError(Exception):
    """At least one rank failed.

    `reports` holds one `RankReport` per rank, in rank order, and `first` the report
    of the rank that failed first. The original exception is `__cause__`.
    """

    def __init__(self, headline: str, reports: list[RankReport], first: RankReport):
        # Not super(): next in line may be the __init__ of the original type.
        Exception.__init__(self, headline)
        self.headline = headline
        self.reports = reports
        self.first = first

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  {report.line()}" for report in self.reports]
        for detail, ranks in self._details().items():
            who = "rank" if len(ranks) == 1 else "ranks"
            lines += ["", f"--- {who} {', '.join(map(str, ranks))} ---", detail]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # The class may be made at run time (see `raised`); pickle cannot find it.
        return (RankError, (self.headline, self.reports, self.first))

    def _details(self) -> dict[str, list[int]]:
        """Each distinct detail with its ranks, the first failure's on top.

        The others are shown when they ended the same way. Otherwise their one line
        is enough: they wait for the rank that failed, or lost the one that died.
        """
        details: dict[str, list[int]] = {}
        for report in sorted(self.reports, key=lambda report: report is not self.first):
            if report.detail and report.kind == self.first.kind:
                details.setdefault(report.detail.rstrip(), []).append(report.rank)
        return details


class RankDied(RankError, RuntimeError):
    """A rank's process ended in the middle of a run."""


class RankTimeout(RankError, TimeoutError):
    """A run was cut at its deadline; the message shows where every rank was."""


def from_reports(
    name: str, reports: list[RankReport], timeout: float | None
) -> RankError:
    """The exception for a failed run of `name`.

    A death explains the exceptions beside it (connection closed), and an exception
    explains the ranks that wait, so they come in this order.
    """
    died = [report for report in reports if report.kind == "died"]
    if died:
        first = died[0]
        return RankDied(f"{name}: rank {first.rank} {first.summary}", reports, first)
    failed = [report for report in reports if report.kind == "raised"]
    if failed:
        return raised(name, reports, min(failed, key=lambda report: report.at))
    first = next(report for report in reports if report.kind == "waiting")
    return RankTimeout(f"{name}: not finished after {timeout} s", reports, first)


def raised(name: str, reports: list[RankReport], first: RankReport) -> RankError:
    """A RankError that is also an instance of the type that `first` raised."""
    original = first.exception
    details = (f"{name}: rank {first.rank} failed", reports, first)
    error = RankError(*details)
    if isinstance(original, Exception):
        # Not always: two C layouts that Python cannot join, a __new__ of its own.
        with contextlib.suppress(Exception):
            title = f"RankError[{type(original).__name__}]"
            error = type(title, (RankError, type(original)), {})(*details)
    error.__cause__ = original
    return error
