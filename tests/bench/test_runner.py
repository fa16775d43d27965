"""A measurement refuses wrong results, counts what it drops, and sends as planned."""

import os
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from tests.bench import contestants
from xtrain.bench import Case, Goal, RaceError, collective_trials, runner
from xtrain.bench.runner import run_measurement, run_on_rank
from xtrain.bench.sampling import SINGLE_ROUNDS, Sample, Settings, keep
from xtrain.comm import ring_all_reduce
from xtrain.plan import collective_traffic

# Two short rounds, nothing dropped: these tests are about the machinery.
SHORT = Settings(
    rounds=2,
    most_rounds=2,
    sample_seconds=1e-4,
    warm_up_seconds=1e-4,
    other_load_limit=1e9,
    patience=0.0,
)


WRONG_LAST = contestants.all_reduce(contestants.off_by_one_on_last_rank)


@pytest.mark.parametrize(
    ("wrong", "options", "what"),
    [
        (WRONG_LAST, {}, "rank 1 output 0 differs in 1 of 100"),
        (contestants.all_reduce(contestants.forgets_to_communicate), {}, "by up to"),
        (contestants.all_reduce(contestants.makes_not_a_number), {},
         "differs in 1 of 100 elements, by up to nan"),
        (contestants.Contestant("wrong shape", contestants.wrong_shape), {},
         r"shapes \[\[3\]\], expected \[\[100\]\]"),
        (contestants.all_reduce(contestants.sends_twice, contestants.ring_traffic), {},
         "rank 0 sent 800 bytes, the formula gives 400"),
        # Without a reference the baseline decides.
        (WRONG_LAST, {"reference": None}, "differs in 1 of 100"),
    ],
)  # fmt: skip
def test_a_wrong_contestant_is_not_timed(world, wrong, options, what):
    race = contestants.race_against_gloo(wrong, **options)
    with pytest.raises(RaceError, match=what) as caught:
        run_measurement(world(2), race, 400, SHORT)
    assert wrong.name in str(caught.value)


def test_a_result_within_the_tolerance_is_timed(world):
    near = contestants.race_against_gloo(WRONG_LAST, reference=None, tolerance=1.0)
    assert run_measurement(world(2), near, 400, SHORT).result(WRONG_LAST.name).kept == 2


def test_a_single_race_times_every_call_by_itself(world):
    ring = contestants.all_reduce(ring_all_reduce, contestants.ring_traffic)
    race = contestants.race_against_gloo(ring)
    long = replace(SHORT, sample_seconds=0.2)
    assert run_measurement(world(2), race, 400, long).result(ring.name).calls > 1
    measurement = run_measurement(world(2), replace(race, single=True), 400, long)
    assert measurement.result(ring.name).calls == 1
    assert measurement.rounds == SINGLE_ROUNDS * long.rounds


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_measurement_holds_bytes_times_and_goals(world, ranks):
    ring = contestants.all_reduce(ring_all_reduce, contestants.ring_traffic)
    goals = (Goal(ring.name, 1e-9, 400, ranks),)
    race = contestants.race_against_gloo(ring, goals=goals)
    measurement = run_measurement(world(ranks), race, 400, SHORT)
    assert (measurement.race, measurement.size) == ("test", 400)
    assert (measurement.ranks, measurement.rounds) == (ranks, 2)
    baseline, result = measurement.results
    sent = list(collective_traffic("ring_all_reduce", 100, ranks).bytes(4).sent)
    assert result.bytes_sent == result.bytes_formula == sent
    assert baseline.bytes_sent is None
    assert baseline.ratio is None
    assert result.seconds > 0
    assert result.ratio == pytest.approx(baseline.seconds / result.seconds)
    assert result.ratio_low <= result.ratio_high
    assert (result.kept, result.dropped) == (2, 0)
    assert result.goal == 1e-9


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_when_others_are_always_too_busy_everything_is_dropped_and_said(world):
    ring = contestants.all_reduce(ring_all_reduce)
    race = contestants.race_against_gloo(ring)
    never = Settings(1, 3, 1e-4, 1e-4, other_load_limit=-1.0, patience=0.0)
    measurement = run_measurement(world(2), race, 400, never)
    for result in measurement.results:
        assert (result.kept, result.dropped) == (0, 3)
        assert result.seconds is result.ratio is None
    assert measurement.other_load is None


def test_samples_under_other_load_are_dropped_and_others_kept():
    assert keep(Sample(1.0, 0.06), limit=0.05) is None
    assert keep(Sample(1.0, 0.05), limit=0.05) == 1.0
    assert keep(Sample(1.0, None), limit=0.05) == 1.0


def scripted_run(samples: dict[str, list[Sample]]) -> tuple[int, list[str]]:
    """Rounds and order of a run whose samples are these."""
    order = []

    def fake(case, trial, calls, clock):
        name = next(name for name, other in trials.items() if other is trial)
        order.append(name)
        return samples[name].pop(0)

    real_sample, real_check = runner.take_sample, runner.check_contestants
    trials = {}

    def check(*args):
        found = real_check(*args)
        trials.update(found[0])
        return found

    runner.take_sample, runner.check_contestants = fake, check
    try:
        race = contestants.race_against_gloo(contestants.all_reduce(ring_all_reduce))
        settings = Settings(2, 6, 1e-4, 1e-4, other_load_limit=0.05, patience=0.0)
        case = Case(400, dist.get_world_size())
        result = run_on_rank(race, case, settings)
    finally:
        runner.take_sample, runner.check_contestants = real_sample, real_check
    return len(result.samples["ring_all_reduce"]), order


def test_rounds_go_on_until_every_contestant_has_enough_and_the_order_varies(world):
    quiet, loud = Sample(1.0, 0.0), Sample(1.0, 0.5)
    samples = {
        "gloo all-reduce": [quiet] * 6,
        "ring_all_reduce": [loud, quiet, loud, loud, quiet, loud],
    }
    for rounds, order in world(2).run(scripted_run, samples):
        assert rounds == 5
        pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
        assert all(set(pair) == set(samples) for pair in pairs)
        assert len(set(pairs)) == 2  # both orders occur


@pytest.mark.parametrize("ranks", [2, 3])
def test_contestants_are_timed_in_the_orders_of_the_seed_on_every_rank(world, ranks):
    samples = {
        name: [Sample(1.0, 0.0)] * 6 for name in ("gloo all-reduce", "ring_all_reduce")
    }
    drawn = islice(runner.orders(samples, Settings().seed), 2)
    expected = [name for order in drawn for name in order]
    for rounds, order in world(ranks).run(scripted_run, samples):
        assert (rounds, order) == (2, expected)


def test_a_round_has_every_contestant_once():
    rounds = list(islice(runner.orders("abc", seed=1), 40))
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len({tuple(order) for order in rounds}) == 6  # every order comes up
    assert rounds == list(islice(runner.orders("abc", seed=1), 40))


def first_bytes() -> list[float]:
    """What the patterns and references hold, small enough to read."""
    case = Case(16, dist.get_world_size())
    rank = dist.get_rank()
    return [
        collective_trials.pattern(case, rank + 1).tolist(),
        collective_trials.all_reduce_reference(case)[0].tolist(),
        collective_trials.reduce_scatter_reference(case)[0].tolist(),
        collective_trials.all_gather_reference(case)[0].tolist(),
    ]


def test_references_worked_out_by_hand(world):
    rank0, rank1 = world(2).run(first_bytes)
    assert rank0 == [[0, 1, 2, 3], [0, 3, 6, 9], [0, 3], [0, 1, 4, 6]]
    assert rank1 == [[0, 2, 4, 6], [0, 3, 6, 9], [6, 9], [0, 1, 4, 6]]


def test_patterns_stay_exact_where_float32_counts_no_further():
    last = collective_trials.pattern(Case(4 * (2**24 + 202), 1), 1)[-1]
    assert last == torch.tensor((2**24 + 201) % 101, dtype=torch.float32)
