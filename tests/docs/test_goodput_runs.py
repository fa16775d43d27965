"""The table of goodput is that of the record, and the page's claim holds in it."""

from xtrain_docs.amounts import percent
from xtrain_docs.lectures.lc8 import goodput


def test_each_run_of_the_record_is_in_the_range_of_such_runs():
    rows = goodput.goodput_runs().rows
    assert len(rows) == len(goodput.runs()["rows"]) >= 2
    for row, run in zip(rows, goodput.runs()["rows"], strict=True):
        low, high = run["simulated"]
        assert low <= run["measured"] <= high
        assert row[4:6] == [percent(run["measured"]), percent(run["formula"])]
    assert min(r["restart"] for r in goodput.runs()["rows"]) < goodput.goodput_run(
        "restart"
    )
