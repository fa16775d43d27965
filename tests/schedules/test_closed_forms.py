"""Every closed form of the papers, met by the schedules as they are played."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from xtrain.plan.bubble import interleaved_activations, pipeline_idle
from xtrain.schedules import (
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)

SIZES = [(2, 2), (2, 5), (3, 4), (4, 8), (8, 24), (5, 11)]
TIMES = [(1, 1, 1), (2, 3, 1.5), (18.522, 18.086, 9.337)]
STEPS = "xtrain.schedules"


def played(schedule, times, **options):
    return simulate(schedule, *times, **options)


def cost(timeline):
    """The longest time from a rank's first start to its last end."""
    return max(
        ends[-1] - starts[0]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    )


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "m"), SIZES)
@pytest.mark.verifies(
    f"{STEPS}.gpipe:gpipe",
    f"{STEPS}.one_f_one_b:one_f_one_b",
    f"{STEPS}.one_f_one_b:_of_rank",
    f"{STEPS}.simulate:simulate",
    f"{STEPS}.simulate:Timeline",
)
def test_gpipe_and_1f1b_are_equally_idle_and_differ_in_memory(ranks, m, times):
    step = sum(times)
    for make in (gpipe, one_f_one_b):
        timeline = played(make(ranks, m), times)
        assert max(timeline.idle) == pytest.approx((ranks - 1) * step)
        assert timeline.makespan == pytest.approx((m + ranks - 1) * step)
        assert timeline.bubble_over_ideal == pytest.approx((ranks - 1) / m)
        assert timeline.idle_fraction == pytest.approx((ranks - 1) / (m + ranks - 1))
    assert simulate(gpipe(ranks, m)).peak_activations == (m,) * ranks
    peaks = simulate(one_f_one_b(ranks, m)).peak_activations
    assert peaks == tuple(min(m, ranks - rank) for rank in range(ranks))


def test_the_published_bubbles_of_4_and_8_ranks():
    for make in (gpipe, one_f_one_b):
        four, eight = simulate(make(4, 8)), simulate(make(8, 24))
        assert four.bubble_over_ideal == 0.375
        assert four.idle_fraction == pytest.approx(0.2727, abs=5e-5)
        assert eight.bubble_over_ideal == pytest.approx(0.2917, abs=5e-5)
        assert eight.idle_fraction == pytest.approx(0.2258, abs=5e-5)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (2, 6), (3, 6), (4, 8), (8, 24)])
@pytest.mark.verifies(
    f"{STEPS}.interleaved:interleaved", f"{STEPS}.interleaved:_of_rank"
)
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, m, chunks, times):
    timeline = played(interleaved(ranks, m, chunks), times)
    whole = chunks * sum(times)
    assert max(timeline.idle) == pytest.approx((ranks - 1) * whole / chunks)
    assert timeline.bubble_over_ideal == pytest.approx((ranks - 1) / (chunks * m))
    if chunks > 1 and m > ranks:
        expected = ranks * (1 + (ranks - 1) / (ranks * chunks))
        assert timeline.peak_activations[0] == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "m"), [(1, 2), (3, 6), (4, 4), (4, 8)])
def test_interleaving_one_chunk_is_1f1b(ranks, m):
    one = interleaved(ranks, m, 1)
    assert one.actions == one_f_one_b(ranks, m).actions


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 4), st.sampled_from(TIMES))
@example(4, 10, 2, TIMES[0])
@example(4, 11, 3, TIMES[1])
@example(8, 3, 4, TIMES[1])
@pytest.mark.verifies(
    f"{STEPS}.interleaved:interleaved", f"{STEPS}.interleaved:_of_rank",
    "xtrain.plan.bubble:interleaved_activations", "xtrain.plan.bubble:pipeline_idle",
)  # fmt: skip
def test_interleaving_any_number_of_micro_batches_no_order_is_faster(p, m, v, times):
    """With whole backwards a step has two bounds, and is as long as the longer one.

    The last rank begins after p - 1 forwards, works on m v virtual stages, and p - 1
    backwards follow. The last stage begins after p v - 1 forwards, works on m
    micro-batches, and p v - 1 backwards follow.
    """
    schedule = interleaved(p, m, v)
    validate(schedule)
    timeline = played(schedule, times)
    longest = max(p - 1 + m * v, p * v - 1 + m)
    assert timeline.makespan == pytest.approx(longest * sum(times))
    idle = pipeline_idle("interleaved", p, *times, micro_batches=m, chunks=v)
    assert max(timeline.idle) == pytest.approx(idle)
    held = [interleaved_activations(p, m, v, rank) for rank in range(p)]
    assert timeline.peak_activations == pytest.approx(held)


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [(4, 10, 2), (4, 3, 2), (4, 7, 3), (3, 3, 2), (8, 24, 3), (3, 8, 2)],
)
def test_interleaving_has_torchs_order_where_torch_takes_the_sizes(p, m, v):
    rounds = max(m // p, 1)
    torchs = SimpleNamespace(
        n_local_stages=v, pp_group_size=p, _n_microbatches=m,
        microbatches_per_round=m // rounds,
    )  # fmt: skip
    letters = {"F": "F", "BW": "B"}
    for rank, actions in enumerate(interleaved(p, m, v).actions):
        order = ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        ours = [f"{stage}{letters[kind]}{i}" for kind, stage, i, _ in actions]
        assert ours == [str(action) for action in order if action is not None]


def test_the_published_bubbles_of_interleaving():
    assert simulate(interleaved(8, 32, 8)).bubble_over_ideal == pytest.approx(
        0.02734, abs=5e-6
    )
    assert simulate(one_f_one_b(8, 1)).bubble_over_ideal == 7


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (3, 6), (4, 8), (5, 11), (8, 24)])
@pytest.mark.verifies(
    f"{STEPS}.zero_bubble:zb_h1",
    f"{STEPS}.zero_bubble:zb_h2",
    f"{STEPS}.zero_bubble:_handmade",
)
def test_zero_bubble_fills_the_idle_time_with_weight_gradients(ranks, m, times):
    f, b, w = times
    first, second = played(zb_h1(ranks, m), times), played(zb_h2(ranks, m), times)
    work = m * sum(times)
    assert cost(first) - work == pytest.approx((ranks - 1) * (f + b - w))
    assert first.peak_activations == tuple(ranks - rank for rank in range(ranks))
    assert first.peak_until_weights == (ranks,) * ranks
    assert cost(second) - work == pytest.approx((ranks - 1) * (f + b - 2 * w))
    peaks = tuple(2 * (ranks - rank) - 1 for rank in range(ranks))
    assert second.peak_activations == peaks
    assert second.peak_until_weights == (2 * ranks - 1,) * ranks


def beyond_work(name: str, ranks: int, f: float, b: float, w: float) -> float:
    """How much longer one step is, first start to last end, than a rank's work."""
    longest = {
        "one_f_one_b": f + b + w,
        "zb_h1": max(f + b - w, f, b),
        "zb_h2": max(f + b - 2 * w, b - f, f),
    }
    return (ranks - 1) * longest[name]


@pytest.mark.parametrize("times", [*TIMES, (1, 2, 1.5), (2, 1, 1.5), (0.5, 2, 2.5)])
@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (3, 6), (8, 24)])
def test_zb_h1_shortens_every_step_and_zb_h2_further_only_where_b_exceeds_w(
    ranks, m, times
):
    f, b, w = times
    one, first, second = (
        played(make(ranks, m), times) for make in (one_f_one_b, zb_h1, zb_h2)
    )
    for timeline in (one, first, second):
        longer = timeline.makespan - m * sum(times)
        name = timeline.schedule.name
        assert longer == pytest.approx(beyond_work(name, ranks, f, b, w))
    waits = (ranks - 1) * max(f + b - 2 * w, b - f, 0)
    assert max(second.idle) == pytest.approx(waits, abs=1e-9)
    if w <= min(f, b):
        gain = one.makespan - first.makespan
        assert gain == pytest.approx(2 * (ranks - 1) * w)
    if f == b == w:
        assert second.makespan == first.makespan


TABLE_5 = [  # of the zero bubble paper: ranks, m, F, B, W, p2p, and the bubble rates
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
]


@pytest.mark.parametrize(
    ("ranks", "m", "f", "b", "w", "c", *("one", "h1", "h2")), TABLE_5
)
def test_bubble_rates_of_the_zero_bubble_paper(ranks, m, f, b, w, c, one, h1, h2):
    work, p = m * (f + b + w), ranks
    forms = {
        one_f_one_b: (m + p - 1) * (f + b + w)
        + c * (2 * (p - 1) * m / p + 2 * (p - 2)),
        zb_h1: work + (p - 1) * (f + b - w) + 4 * (p - 1) * c,
        zb_h2: work + (p - 1) * (f + b - 2 * w) + 2 * (p - 1) * c,
    }
    for (make, form), published in zip(forms.items(), (one, h1, h2), strict=True):
        took = cost(simulate(make(p, m), f, b, w, p2p=c))
        assert took == pytest.approx(form)
        assert (took - work) / took == pytest.approx(published, abs=6e-5)


@pytest.mark.parametrize(("ranks", "m"), [(1, 1), (2, 3), (3, 5), (4, 8), (8, 24)])
@pytest.mark.verifies(f"{STEPS}.zero_bubble:zb_v", f"{STEPS}.zero_bubble:_v_shaped")
def test_the_v_has_no_bubble_and_the_same_memory_on_every_rank(ranks, m):
    timeline = simulate(zb_v(ranks, m))
    assert timeline.idle == (0,) * ranks
    assert timeline.peak_activations == (ranks,) * ranks
    assert timeline.parameter_copies == 1


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 10), (6, 12), (8, 20), (16, 40)])
@pytest.mark.verifies(f"{STEPS}.dualpipe:dualpipe", f"{STEPS}.dualpipe:dualpipe_v")
def test_dualpipe_is_as_idle_as_its_report_says(ranks, m):
    form = (ranks / 2 - 1) * (3 + 2 - 3)  # (P/2 - 1)(F&B + BW - 3W)
    both = simulate(dualpipe(ranks, m))
    assert max(both.idle) == pytest.approx(form)
    assert both.peak_activations == (ranks + 1,) * ranks
    assert both.parameter_copies == 2
    half = simulate(dualpipe_v(ranks // 2, m // 2))
    assert half.idle == both.idle[: ranks // 2]
    virtual = [2 * peak for peak in half.peak_activations]
    assert virtual == [ranks + 1] * (ranks // 2)
    assert half.parameter_copies == 1


def test_the_share_of_idle_time_of_dualpipe_and_of_1f1b():
    assert simulate(dualpipe(8, 20)).idle_fraction == pytest.approx(6 / 66)
    assert simulate(one_f_one_b(8, 20)).idle_fraction == pytest.approx(21 / 81)


def test_where_dualpipes_closed_form_is_not_exact():
    uneven = simulate(dualpipe(8, 20), 1, 1.3, 0.9, overlapped=3.2)
    assert max(uneven.idle) == pytest.approx(7.2)
    form = 3 * (3.2 + 2.2 - 3 * 0.9)
    assert form == pytest.approx(8.1), "the form says more"
    gain = simulate(dualpipe(8, 20), overlapped=2.5)
    from_zero = [i + s[0] for i, s in zip(gain.idle, gain.starts, strict=True)]
    assert from_zero[:4] == [3.5, 4, 4.5, 4.5]
    assert max(from_zero) == 3 * (2.5 + 2 - 3)


@pytest.mark.parametrize("made", [dualpipe(8, 20), dualpipe_v(4, 10)])
def test_the_first_two_in_the_middle_could_be_a_pair_but_its_output_would_leave_later(
    made,
):
    orders = [list(actions) for actions in made.actions]
    for actions in orders[3 : 5 if made.ranks == 8 else 4]:
        for at, (one, two) in enumerate(pairwise(actions)):
            if (one.kind, one.under, two.kind) == ("F", None, "BW"):
                actions[at : at + 2] = [one._replace(under=two)]
                break
    paired = replace(made, actions=tuple(orders))
    validate(paired)
    assert sum(map(len, made.actions)) - sum(map(len, orders)) == made.ranks // 4
    assert simulate(paired).makespan == simulate(made).makespan
    assert simulate(paired, p2p=0.3).makespan > simulate(made, p2p=0.3).makespan


COUNTS = {
    0: [6, 1, 3, 3, 3, 1, 3, 1], 1: [4, 2, 2, 4, 2, 2, 2, 2],
    2: [2, 3, 1, 5, 1, 3, 1, 3], 3: [0, 4, 0, 6, 0, 4, 0, 4],
}  # fmt: skip


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.verifies(f"{STEPS}.dualpipe:_eight_steps")
def test_the_eight_steps_of_dualpipe_are_taken_as_often_as_published(rank):
    schedule = dualpipe(8, 20)
    n = COUNTS[min(rank, 7 - rank)]
    kinds = ["&" if a.under else a.kind for a in schedule.actions[rank]]
    middle = ["F", "BW"] if n[2] == 0 else ["&"]
    backwards = ["BW"] * n[5] + ["B"] * n[5]
    assert kinds == (
        ["F"] * n[0]
        + ["F", "F"] * n[1]
        + ["B", "W", "F"] * n[2]
        + middle + ["&"] + ["&", "&"] * (n[3] - 1)
        + ["BW", "&"] * n[4]
        + backwards
        + ["W", "B"] * n[6]
        + ["W"] * n[7]
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
@pytest.mark.verifies(f"{STEPS}.chimera:chimera", f"{STEPS}.chimera:_of_rank")
def test_chimera_is_idle_as_published(ranks):
    timeline = simulate(chimera(ranks, ranks))
    idle = (ranks - 2) / (3 * ranks / 2 + ranks - 2)
    assert timeline.idle_fraction == pytest.approx(idle)
    assert timeline.peak_activations[0] == ranks / 2 + 1
    assert max(timeline.peak_activations) == ranks


def test_chimera_goes_on_with_the_next_micro_batches_before_the_last_are_done():
    once, twice = simulate(chimera(4, 4)), simulate(chimera(4, 8))
    assert twice.makespan < 2 * once.makespan
    assert max(twice.idle) < 2 * max(once.idle)


def test_the_exchange_of_experts_hides_under_a_pair_as_far_as_it_lasts():
    alone = simulate(one_f_one_b(1, 1), all_to_all=2.0)
    assert alone.makespan == 3 + 2 * 2.0
    inside = simulate(dualpipe(2, 40), all_to_all=1.5)
    outside = simulate(dualpipe(2, 40), all_to_all=2.0)
    pairs = sum(a.under is not None for a in dualpipe(2, 40).actions[0])
    longest = max(e - s for s, e in zip(inside.starts[0], inside.ends[0], strict=True))
    assert longest == 2 + 1.5, "a backward alone waits for its exchange"
    added = outside.works[0] - inside.works[0]
    alone = 40 - pairs
    assert added == pytest.approx(pairs * 1.0 + alone * 2 * 0.5)
