"""Entries of the errata pages that are proved by counting what these pages show."""

from xtrain_docs.lectures.lc3.common import STAGES
from xtrain_docs.tables.home import LECTURES

ENDS = ("Communication", "All together")
"""Lectures that are no parallelism: what is under all of them, and all at once."""


def test_four_stages_and_six_parallelisms():
    """E47: plain data parallelism and three stages are four; data, ZeRO, tensor,
    pipeline, context and expert are six."""
    assert STAGES == ("0", "1", "2", "3")
    titles = [title for _, title, _ in LECTURES if title not in ENDS]
    assert len(titles) == 6
    assert sum("parallel" in title for title in titles) == 5  # and ZeRO
