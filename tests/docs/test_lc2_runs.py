"""The figures of lc2: drawn from runs, and from what programs printed."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.lectures.lc2 import (
    accumulation,
    boxes,
    buckets_and_overlap,
    distributed_sampler,
    index,
    printed_bars,
    unused_parameters,
)

DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"


def test_larger_buckets_are_fewer_and_hold_the_same_bytes():
    each, small, whole = map(buckets_and_overlap.bucket_bytes, (0, 18, 1024))
    assert [len(sizes) for sizes in (each, small, whole)] == [12, 6, 1]
    assert sum(each) == sum(small) == sum(whole) == 4 * (6 * (64 * 64 + 64) + 1)


@pytest.mark.verifies(DDP)
def test_the_clock_shows_buckets_leaving_during_backward(on_ranks):
    events = runs.remembered(buckets_and_overlap.backward_by_the_clock, 2, 4, 512, 1.0)[
        0
    ]
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
    drawing = buckets_and_overlap.overlap_chart(events)
    assert "1 of 2 buckets leave before the last gradient" in drawing
    boxes = re.findall(r'<rect x="([\d.]+)" .*?width="([\d.]+)"', drawing)
    starts = [float(x) for x, _ in boxes]
    widths = [float(w) for _, w in boxes]
    unit = (buckets_and_overlap.WIDTH - buckets_and_overlap.LEFT - 6) / 4
    at = [buckets_and_overlap.LEFT + unit * time for time in (0, 1, 1, 2)]
    assert starts == pytest.approx(at, abs=2)  # two gradients, two buckets
    assert widths == pytest.approx([unit, unit, 2 * unit, 2 * unit], abs=2)
    dots = re.findall(r'<circle cx="([\d.]+)"', drawing)
    assert [float(x) for x in dots] == pytest.approx(at[1:2] + at[3:], abs=1)


FIGURES = {
    "data_parallel_step": index.data_parallel_step,
    "dealt_samples": distributed_sampler.dealt_samples,
    "calls_by_micro_batch": accumulation.calls_by_micro_batch,
    "a_bucket_waits": unused_parameters.a_bucket_waits,
}


def test_every_figure_fits_a_phone_and_says_what_it_shows(on_ranks):
    """A card on a 390-pixel screen is 324 pixels wide inside; letters stay at 0.8."""
    for name, figure in FIGURES.items():
        drawn = figure()
        (wide,) = re.findall(r'viewBox="0 0 (\d+)', drawn)
        assert f"min-width:{round(0.8 * int(wide))}px" in drawn
        assert 0.8 * int(wide) <= 324, name  # it shrinks and does not scroll
        (label,) = re.findall(r'aria-label="([^"]+)"', drawn)
        assert re.search(r"rank|batch", label), name
        for x, wide in re.findall(r'<rect x="([\d.]+)" .*?width="([\d.]+)"', drawn):
            assert float(x) + float(wide) <= boxes.WIDTH, name


def test_the_ranks_of_a_step_agree_on_the_mean_alone(on_ranks):
    found = runs.remembered(index.one_step, 4, 16)
    assert sorted(i for seen in found for i in seen["samples"]) == list(range(16))
    for key, different in (("loss", 4), ("own", 4), ("mean", 1), ("weight", 1)):
        assert len({seen[key] for seen in found}) == different
    mean = sum(seen["own"] for seen in found) / 4
    assert found[0]["mean"] == pytest.approx(mean, abs=2e-4)


def test_samples_are_placed_under_their_turn():
    drawn = distributed_sampler.dealt_samples(10, 4)
    placed = re.findall(
        r'<rect x="([\d.]+)"[^>]*class="([^"]+)"[^>]*><title>sample (\d): ([^<]+)<',
        drawn,
    )
    assert len(placed) == 12 + 12 + 10 + 8
    places: dict[str, set[str]] = {}
    for x, _, sample, where in placed:
        places.setdefault(f"{sample} {where}", set()).add(x)
    assert all(len(xs) <= 2 for xs in places.values())
    assert sum("left out" in name for name in places) == 2
    assert sum("once more" in name for name in places) == 2


def test_bars_are_what_the_programs_printed():
    drawn = printed_bars.what_is_reduced("lc2/reduce_gradients_not_loss.out")
    for rank, sample in enumerate((3, 5)):
        for reduced in ("nothing", "loss"):
            assert f"{reduced} reduced, rank {rank}: {sample}<" in drawn
        assert f"gradient reduced, rank {rank}: 4<" in drawn
    assert "one process: 4" in drawn
    drawn = printed_bars.weighed_tokens("lc2/token_weighted_loss.out")
    for words in ("rank 0, token 2: 3", "rank 1, token 0: 6", "mean of means, mean: 4",
                  "sums over count, mean: 3", "one process: 3"):  # fmt: skip
        assert f"{words}<" in drawn


def test_micro_batches_in_no_sync_call_nothing(on_ranks):
    run = accumulation.calls
    always = runs.remembered(run, 2, 3, False)[0]
    quiet = runs.remembered(run, 2, 3, True)[0]
    assert [len(calls) for calls in always] == [2, 2, 2]
    assert quiet == [[], [], always[2]]
    assert accumulation.calls_by_micro_batch(3).count("all-reduces, ") == 2 * 4


def test_a_skipped_layer_is_filled_with_zeros_before_its_bucket_leaves(on_ranks):
    found = runs.remembered(unused_parameters.a_layer_is_skipped, 2, 1)
    assert found[0] == ["gradient 3", "gradient 2", "sent", "gradient 1", "gradient 0",
                        "sent", "error"]  # fmt: skip
    assert found[1] == [event for event in found[0] if event != "gradient 1"]
    words = [
        box.words.split("\n")[0] for box in unused_parameters.waiting_boxes(found[1])
    ]
    assert words == ["grad", "grad", "send", "grad", "zeros", "send", "raise"]
