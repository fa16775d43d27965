"""The closed forms of pipelines equal what the simulator plays."""

import pytest

from xtrain.plan import (
    bubble_over_ideal,
    idle_fraction,
    pipeline_activations,
    pipeline_idle,
)
from xtrain.schedules import SCHEDULES, simulate

CASES = {
    "gpipe": (4, 8, {}), "one_f_one_b": (4, 8, {}), "zb_h1": (4, 8, {}),
    "zb_h2": (4, 8, {}), "zb_v": (4, 8, {}), "chimera": (6, 6, {}),
    "interleaved": (4, 8, {"chunks": 3}), "dualpipe": (8, 20, {}),
    "dualpipe_v": (4, 10, {}),
}  # fmt: skip
ANY_TIMES = ("gpipe", "one_f_one_b", "interleaved", "chimera")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.verifies(
    "xtrain.plan.bubble:pipeline_idle", "xtrain.plan.bubble:pipeline_activations"
)
def test_forms_of_idle_time_and_activations_are_what_is_played(name):
    ranks, m, options = CASES[name]
    schedule = SCHEDULES[name](ranks, m, **options)
    timeline = simulate(schedule)
    assert max(timeline.idle) == pytest.approx(pipeline_idle(name, ranks))
    held = pipeline_activations(name, ranks, m, schedule.chunks)
    assert max(timeline.peak_activations) == pytest.approx(held)
    if name in ANY_TIMES:
        times = (2.0, 3.0, 1.5)
        played = max(simulate(schedule, *times).idle)
        assert played == pytest.approx(pipeline_idle(name, ranks, *times))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.verifies(
    "xtrain.plan.bubble:bubble_over_ideal", "xtrain.plan.bubble:idle_fraction"
)
def test_two_shares_of_one_bubble(name):
    """Over the ideal time and over the whole: what a simulated timeline says."""
    ranks, m, options = CASES[name]
    schedule = SCHEDULES[name](ranks, m, **options)
    timeline = simulate(schedule)
    arguments = name, ranks, m, schedule.chunks
    over, part = bubble_over_ideal(*arguments), idle_fraction(*arguments)
    assert over == pytest.approx(timeline.bubble_over_ideal)
    assert part == pytest.approx(timeline.idle_fraction)
    if name in ANY_TIMES:
        times = {"forward": 2.0, "backward_input": 3.0, "backward_weight": 1.5}
        played = simulate(schedule, *times.values())
        assert bubble_over_ideal(*arguments, **times) == pytest.approx(
            played.bubble_over_ideal
        )
        assert idle_fraction(*arguments, **times) == pytest.approx(played.idle_fraction)


@pytest.mark.verifies(
    "xtrain.plan.bubble:bubble_over_ideal", "xtrain.plan.bubble:idle_fraction"
)
@pytest.mark.parametrize(("ranks", "m"), [(4, 8), (8, 24), (8, 32), (16, 16)])
def test_the_shares_that_papers_print(ranks, m):
    """Megatron and Llama 3 over the ideal time; GPipe and zero bubble over all."""
    assert bubble_over_ideal("one_f_one_b", ranks, m) == (ranks - 1) / m
    assert idle_fraction("gpipe", ranks, m) == pytest.approx(
        (ranks - 1) / (m + ranks - 1)
    )
    interleaved = bubble_over_ideal("interleaved", ranks, m, 4)
    assert interleaved == pytest.approx((ranks - 1) / (4 * m))


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_forms_of_zero_bubble_count_the_time_of_the_whole_step(name):
    f, b, w = 2.0, 3.0, 1.5
    timeline = simulate(SCHEDULES[name](4, 12), f, b, w)
    longest = max(
        e[-1] - s[0] for s, e in zip(timeline.starts, timeline.ends, strict=True)
    )
    assert longest - 12 * (f + b + w) == pytest.approx(pipeline_idle(name, 4, f, b, w))


def test_a_schedule_without_a_form_is_named():
    for form in (pipeline_idle, pipeline_activations):
        sizes = (4,) if form is pipeline_idle else (4, 8)
        with pytest.raises(ValueError, match="no form for 'dualpipe_simple'"):
            form("dualpipe_simple", *sizes)
