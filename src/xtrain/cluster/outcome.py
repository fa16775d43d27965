"""How the ranks of a cluster have ended: the error of the first one to fail."""

import traceback
from collections.abc import Sequence

from xtrain.cluster.deadlock import Deadlock
from xtrain.cluster.scheduler import Rank
from xtrain.testing.errors import RankError, RankReport, raised

SHOWN_TRACES = 8


def failure_of(ranks: Sequence[Rank], name: str) -> RankError | None:
    """What a run of the function `name` raises; None when all ranks returned."""
    failed = [rank for rank in ranks if rank.error is not None]
    if not failed:
        return None
    first = min(failed, key=lambda rank: rank.failed_as)
    reports = [report_of(rank) for rank in ranks]
    error = raised(name, reports, reports[ranks.index(first)])
    if isinstance(first.error, Deadlock):
        error.cycle = first.error.cycle  # type: ignore[attr-defined]
    return error


def report_of(rank: Rank) -> RankReport:
    """How a rank ended; with the traceback, for the first ones to fail."""
    error, trace = rank.error, ""
    if error is None:
        return RankReport(rank.number, "returned")
    if rank.failed_as <= SHOWN_TRACES:
        frames = error.__traceback__ and error.__traceback__.tb_next
        trace = "".join(traceback.format_exception(type(error), error, frames))
    summary = "".join(traceback.format_exception_only(error)).strip()
    return RankReport(
        rank.number, "raised", summary, trace, error, float(rank.failed_as)
    )
