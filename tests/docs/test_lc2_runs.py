"""The tables and figures of lc2: drawn from runs, and refused when a run disagrees."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc2 import figures, tables
from xtrain_docs.lectures.lc2 import runs as lc2_runs

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"


@pytest.mark.verifies(DDP)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_step_sends_its_formula(on_ranks, ranks):
    phi = 4 * lc2_runs.parameters_of_net()
    sent = tables.sent_by_ddp(ranks)
    assert 0 <= sent - 2 * (ranks - 1) / ranks * phi <= 8 * ranks
    if ranks < 8:
        assert tables.sent_by_ddp(ranks, 3, no_sync=True) == sent
        assert tables.sent_by_ddp(ranks, 3, no_sync=False) == 3 * sent


def test_another_formula_is_refused(on_ranks, monkeypatch):
    monkeypatch.setattr(lc2_runs, "parameters_of_net", lambda: 24_000)
    with pytest.raises(EvidenceError, match="DDP, 2 ranks: sent"):
        tables.sent_by_ddp(2)


@pytest.mark.verifies(DDP, "xtrain.data_parallel.naive:NaiveDataParallel")
def test_buckets_save_calls_and_no_bytes(on_ranks):
    naive, small, whole = (
        runs.remembered(lc2_runs.calls_of_step, 2, *how)[0]
        for how in (("naive", 0), ("buckets", 18), ("buckets", 1024))
    )
    assert [len(calls) for calls in (naive, small, whole)] == [12, 6, 1]
    assert sum(naive) == sum(small) - 4 == sum(whole) - 4  # the spare element


def test_tables_are_whole(on_ranks):
    for table in (
        tables.ddp_bytes(),
        tables.bucket_calls(2),
        tables.accumulation_bytes(2),
    ):
        assert len(table.markdown()) == 6


@pytest.mark.verifies(DDP)
def test_the_clock_shows_buckets_leaving_during_backward(on_ranks):
    events = runs.remembered(lc2_runs.backward_by_the_clock, 2, 4, 512, 1.0)[0]
    order = [(what, number) for what, number, _ in events]
    assert [n for what, n in order if what == "gradient"] == [3, 2, 1, 0]
    assert [n for what, n in order if what == "sent"] == [0, 1, 2, 3]
    assert sorted(n for what, n in order if what == "done") == [0, 1, 2, 3]
    assert order.index(("sent", 0)) < order.index(("gradient", 0))
    for bucket in range(4):
        assert order.index(("sent", bucket)) < order.index(("done", bucket))


def test_the_figure_places_bars_by_the_clock():
    events = [["gradient", 1, 1.0], ["sent", 0, 1.0], ["gradient", 0, 2.0],
              ["done", 0, 3.0], ["sent", 1, 2.0], ["done", 1, 4.0],
              ["end", 0, 4.0]]  # fmt: skip
    drawing = figures.overlap_chart(events)
    assert "1 of 2 buckets leave before the last gradient" in drawing
    boxes = re.findall(r'<rect x="([\d.]+)" .*?width="([\d.]+)"', drawing)
    starts = [float(x) for x, _ in boxes]
    widths = [float(w) for _, w in boxes]
    unit = (figures.WIDTH - figures.LEFT - 10) / 4
    expected = [0, 1, 1, 2]  # two gradients, two buckets
    assert starts == pytest.approx([figures.LEFT + unit * at for at in expected], abs=2)
    assert widths == pytest.approx([unit, unit, 2 * unit, 2 * unit], abs=2)
