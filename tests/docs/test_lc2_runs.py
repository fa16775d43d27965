"""The tables and figures of lc2: drawn from runs, and refused when a run disagrees."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc2 import (
    dealing,
    drawing,
    figures,
    runs_figures,
    sequences,
    tables,
    timeline,
)
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
    assert [n for what, n in order if what == "ready"] == [0, 1, 2, 3]
    assert [n for what, n in order if what == "sent"] == [0, 1, 2, 3]
    assert sorted(n for what, n in order if what == "done") == [0, 1, 2, 3]
    assert order.index(("sent", 0)) < order.index(("gradient", 0))
    for bucket in range(4):
        steps = [order.index((what, bucket)) for what in ("ready", "sent", "done")]
        assert steps == sorted(steps)
        assert order.index(("gradient", 3 - bucket)) < steps[0]
    assert order.index(("gradient", 0)) < order.index(("end", 0))


def test_the_figure_places_bars_by_the_clock():
    events = [["gradient", 1, 1.0], ["ready", 0, 1.0], ["sent", 0, 1.0],
              ["gradient", 0, 2.0], ["ready", 1, 2.0], ["done", 0, 3.0],
              ["sent", 1, 2.0], ["done", 1, 4.0], ["end", 0, 4.0]]  # fmt: skip
    drawing = timeline.overlap_chart(events)
    assert "1 of 2 buckets leave before the last gradient" in drawing
    boxes = re.findall(r'<rect x="([\d.]+)" .*?width="([\d.]+)"', drawing)
    starts = [float(x) for x, _ in boxes]
    widths = [float(w) for _, w in boxes]
    unit = (timeline.WIDTH - timeline.LEFT - 6) / 4
    at = [timeline.LEFT + unit * time for time in (0, 1, 1, 2)]
    assert starts == pytest.approx(at, abs=2)  # two gradients, two buckets
    assert widths == pytest.approx([unit, unit, 2 * unit, 2 * unit], abs=2)
    dots = re.findall(r'<circle cx="([\d.]+)"', drawing)
    assert [float(x) for x in dots] == pytest.approx(at[1:2] + at[3:], abs=1)


FIGURES = (
    figures.data_parallel_step, figures.what_differs, dealing.dealt_samples,
    figures.what_is_reduced, figures.weighed_tokens, sequences.joined_steps,
    sequences.calls_by_micro_batch, sequences.a_bucket_waits,
)  # fmt: skip


def test_every_figure_fits_a_phone_and_says_what_it_shows(on_ranks):
    """A card on a 390-pixel screen is 324 pixels wide inside; letters stay at 0.8."""
    for figure in FIGURES:
        drawn = figure()
        assert "min-width:0" in drawn  # it shrinks and does not scroll
        (wide,) = re.findall(r'viewBox="0 0 (\d+)', drawn)
        assert 0.8 * int(wide) <= 324, figure.__name__
        (label,) = re.findall(r'aria-label="([^"]+)"', drawn)
        assert re.search(r"rank|batch", label), figure.__name__
        for x, wide in re.findall(r'<rect x="([\d.]+)" .*?width="([\d.]+)"', drawn):
            assert float(x) + float(wide) <= drawing.WIDTH, figure.__name__


def test_the_ranks_of_a_step_agree_on_the_mean_alone(on_ranks):
    found = runs.remembered(runs_figures.one_step, 4, 16)
    assert sorted(i for seen in found for i in seen["samples"]) == list(range(16))
    for key, different in (("loss", 4), ("own", 4), ("mean", 1), ("weight", 1)):
        assert len({seen[key] for seen in found}) == different
    mean = sum(seen["own"] for seen in found) / 4
    assert found[0]["mean"] == pytest.approx(mean, abs=2e-4)


def test_ranks_that_differ_after_a_step_are_refused(monkeypatch):
    one = {"samples": [0], "loss": 1.0, "own": 1.0, "mean": 1.0, "weight": 1.0}
    monkeypatch.setattr(runs, "remembered", lambda *_: [one, {**one, "weight": 2.0}])
    with pytest.raises(EvidenceError, match="ranks differ after the step"):
        figures.data_parallel_step(2)


def test_samples_are_placed_under_their_turn(on_ranks):
    padded = runs.remembered(runs_figures.dealt, 4, 10, False)
    dropped = runs.remembered(runs_figures.dealt, 4, 10, True)
    drawn = dealing.deal_chart(padded, dropped, 10)
    boxes = re.findall(
        r'<rect x="([\d.]+)"[^>]*class="([^"]+)"[^>]*><title>sample (\d): ([^<]+)<',
        drawn,
    )
    assert len(boxes) == 12 + 12 + 10 + 8
    places: dict[str, set[str]] = {}
    for x, _, sample, where in boxes:
        places.setdefault(f"{sample} {where}", set()).add(x)
    assert all(len(xs) <= 2 for xs in places.values())
    assert sum("left out" in name for name in places) == 2
    assert sum("once more" in name for name in places) == 2
    with pytest.raises(EvidenceError, match="not one permutation"):
        dealing.deal_chart([[0, 1], [1, 2]], [[0], [1]], 4)


def test_only_the_gradient_s_reduction_changes_the_gradient(on_ranks):
    found = runs.remembered(runs_figures.gradient_by_what_is_reduced, 2)
    assert found == [{"nothing": 3, "loss": 3, "gradient": 4},
                     {"nothing": 5, "loss": 5, "gradient": 4}]  # fmt: skip


def test_another_mean_of_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(runs, "remembered", lambda *_: [{"means": 4.0, "sums": 4.0}])
    with pytest.raises(EvidenceError, match=r"give 4.0, not 3.0"):
        figures.weighed_tokens()


def test_a_rank_without_batches_is_a_shadow(on_ranks):
    short, long = runs.remembered(runs_figures.joined, 2, [2, 4])
    assert [kind for kind, *_ in short] == ["batch", "batch", "shadow", "shadow"]
    assert [mean for *_, mean in long] == [1, 2, 1.5, 2]
    assert sequences.joined_steps().count(">shadow<") == 2


def test_micro_batches_in_no_sync_call_nothing(on_ranks):
    run = runs_figures.collectives_by_micro_batch
    always = runs.remembered(run, 2, 3, False)[0]
    quiet = runs.remembered(run, 2, 3, True)[0]
    assert [len(calls) for calls in always] == [2, 2, 2]
    assert quiet == [[], [], always[2]]
    assert sequences.calls_by_micro_batch(3).count("all-reduces, ") == 2 * 4


def test_a_skipped_layer_is_filled_with_zeros_before_its_bucket_leaves(on_ranks):
    found = runs.remembered(runs_figures.a_layer_is_skipped, 2, 1)
    assert found[0] == ["gradient 3", "gradient 2", "sent", "gradient 1", "gradient 0",
                        "sent", "error"]  # fmt: skip
    assert found[1] == [event for event in found[0] if event != "gradient 1"]
    words = [box.words.split("\n")[0] for box in sequences.waiting_boxes(found[1])]
    assert words == ["grad", "grad", "send", "grad", "zeros", "send", "raise"]


def test_dots_at_one_value_stand_in_a_pile():
    def dots(*values):
        row = drawing.Scale("loss", [(str(i), v) for i, v in enumerate(values)])
        drawn = drawing.scales([row], "title")
        return re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*class=', drawn)

    (left, low), (middle, high), (right, same) = dots(1.0, 1.0, 3.0)
    assert left == middle != right
    assert float(low) - float(high) == 2 * drawing.RADIUS
    assert low == same
