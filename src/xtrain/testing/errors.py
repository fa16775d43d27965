"""What went wrong on the ranks, as one exception in the parent.

    rank 0: returned   rank 1: ValueError   rank 2: waiting in recv(src=1)
                             |
    RankError: also a ValueError, message = rank 1's traceback + one line per rank

The type of the first failure is kept, so `pytest.raises(ValueError)` works on a
`World.run` as it does on a plain call.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankReport:
    """How one rank ended a run.

    `kind` is "returned", "raised", "died" (a signal or an exit) or "waiting" (still
    busy when the run was cut). `summary` is one line, `detail` the traceback, the
    Python stack or what the rank wrote to stderr before it died.
    """

    rank: int
    kind: str
    summary: str = ""
    detail: str = ""
    exception: BaseException | None = None

    def line(self) -> str:
        """One line: the rank and what happened to it."""
        return f"rank {self.rank}: {self.summary or self.kind}"


class RankError(Exception):
    """At least one rank failed.

    `reports` holds one `RankReport` per rank, in rank order, and `first` the report
    of the rank that failed first. The original exception is `__cause__`.
    """

    def __init__(self, headline: str, reports: list[RankReport], first: RankReport):
        super().__init__(headline)
        self.reports = reports
        self.first = first

    def __str__(self) -> str:
        return describe(self.args[0], self.reports, self.first)

    def __reduce__(self) -> tuple[object, ...]:
        # The class may be made at run time (see `raised`), which pickle cannot find.
        return (RankError, (self.args[0], self.reports, self.first))


class RankDied(RankError, RuntimeError):
    """A rank's process ended in the middle of a run."""


class RankTimeout(RankError, TimeoutError):
    """A run was cut at its deadline; the message shows where every rank was."""


def describe(headline: str, reports: list[RankReport], first: RankReport) -> str:
    """The message: headline, one line per rank, then every detail worth reading."""
    lines = [headline, *(f"  {report.line()}" for report in reports)]
    details: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: report is not first):
        if report.detail:
            details.setdefault(report.detail.rstrip(), []).append(report.rank)
    for detail, ranks in details.items():
        label = ", ".join(str(rank) for rank in ranks)
        lines += ["", f"--- rank {label} ---", detail]
    return "\n".join(lines)


def raised(first: RankReport, reports: list[RankReport]) -> RankError:
    """The exception for a run in which `first` raised: a RankError and its type."""
    original = first.exception
    headline = f"rank {first.rank} of {len(reports)} raised {first.summary}"
    kind = RankError
    if isinstance(original, Exception):
        name = f"RankError[{type(original).__name__}]"
        try:
            kind = type(name, (RankError, type(original)), {})
        except TypeError:
            kind = RankError  # two C layouts that Python cannot join
    error = kind(headline, reports, first)
    error.__cause__ = original
    return error
