"""The closed forms of pipelines equal what the simulator plays."""

import pytest

from xtrain.plan import (
    bubble_over_ideal,
    idle_fraction,
    pipeline_activations,
    pipeline_idle,
)
from xtrain.schedules import SCHEDULES, simulate

BUBBLE = "xtrain.plan.bubble"
CASES = {
    "gpipe": (4, 8, {}), "one_f_one_b": (4, 8, {}), "zb_h1": (4, 8, {}),
    "zb_h2": (4, 8, {}), "zb_v": (4, 8, {}), "chimera": (6, 6, {}),
    "interleaved": (4, 8, {"chunks": 3}), "dualpipe": (8, 20, {}),
    "dualpipe_v": (4, 10, {}),
}  # fmt: skip
ANY_TIMES = ("gpipe", "one_f_one_b", "interleaved", "chimera")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.verifies(
    f"{BUBBLE}:pipeline_idle", f"{BUBBLE}:pipeline_activations",
    f"{BUBBLE}:bubble_over_ideal", f"{BUBBLE}:idle_fraction",
)  # fmt: skip
def test_the_forms_are_what_is_played(name):
    """Idle time, its share of the ideal and of the whole time, and activations."""
    ranks, m, options = CASES[name]
    schedule = SCHEDULES[name](ranks, m, **options)
    sizes = name, ranks, m, schedule.chunks
    held = max(simulate(schedule).peak_activations)
    assert held == pytest.approx(pipeline_activations(*sizes))
    equal = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}
    other = {"forward": 2.0, "backward_input": 3.0, "backward_weight": 1.5}
    for times in (equal, other) if name in ANY_TIMES else (equal,):
        played = simulate(schedule, *times.values())
        idle = pipeline_idle(name, ranks, *times.values())
        assert max(played.idle) == pytest.approx(idle)
        over, part = bubble_over_ideal(*sizes, **times), idle_fraction(*sizes, **times)
        assert over == pytest.approx(played.bubble_over_ideal)
        assert part == pytest.approx(played.idle_fraction)


def test_times_are_1_unless_given():
    assert pipeline_idle("gpipe", 4) == 9
    assert bubble_over_ideal("gpipe", 4, 8) == 3 / 8


@pytest.mark.verifies(f"{BUBBLE}:bubble_over_ideal", f"{BUBBLE}:idle_fraction")
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
        with pytest.raises(ValueError, match="'dualpipe_simple' is not one of gpipe, "):
            form("dualpipe_simple", *sizes)
