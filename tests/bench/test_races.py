"""Every race that ships runs correctly at a small size, with its exact bytes."""

from dataclasses import replace

import pytest

from tests.bench.test_runner import SHORT
from xtrain.bench import Contestant, Goal, Race, race_sets
from xtrain.bench.races import lc1
from xtrain.bench.runner import run_measurement

SETS = {name: race_sets.load(name).RACES for name in race_sets.names()}
RACES = [
    (name, race)
    for name, races in SETS.items()
    for race in races
    if name not in ("lc4", "lc5") or "batch8" not in race.name  # like small, but slow
    if name != "lc7" or race.name not in ("loop_many", "transformers_many")
    if name != "lc8"  # has layouts of its own: test_trainer_trials
]
FEW_BYTES = ("lc1", "backends")
ONCE = replace(SHORT, rounds=1, most_rounds=1)  # results are checked before the rounds


CASES = [
    pytest.param(
        race,
        ranks,
        id=f"{name}-{race.name}-{ranks}",
        # Steps of whole models: `xtrain bench` checks them on 4 ranks before it times.
        marks=[pytest.mark.slow] if ranks == 4 and name not in FEW_BYTES else [],
    )
    for name, race in RACES
    for ranks in (2, 4)
]


@pytest.mark.verifies("xtrain.bench.race:Trial", "xtrain.bench.race:Contestant")
@pytest.mark.parametrize(("race", "ranks"), CASES)
def test_race_is_correct_and_sends_what_the_plan_says(world, race, ranks):
    once = replace(race, rounds=1)  # also where a sample is a single call
    measurement = run_measurement(world(ranks), once, 4096, ONCE)
    runs = [c.name for c in race.contestants if not c.ranks or ranks in c.ranks]
    assert [result.name for result in measurement.results] == runs
    formulas = {c.name for c in race.contestants if c.traffic is not None}
    assert formulas or race not in SETS["lc1"]  # elsewhere often only gloo knows
    for result in measurement.results[1:]:
        if result.name not in formulas:
            continue
        assert result.bytes_formula
        # Where a collective of torch's sends, only the sockets can count.
        if result.name != "one-shot" and race not in SETS["lc4"]:
            assert result.bytes_sent == result.bytes_formula
        if result.wire_bytes and world(ranks).backend == "gloo":  # others: no TCP
            both = zip(result.wire_bytes, result.bytes_formula, strict=True)
            assert all(wire >= formula for wire, formula in both)


@pytest.mark.parametrize("name", SETS)
def test_goals_belong_to_measurements_that_are_run(name):
    for race in SETS[name]:
        for goal in race.goals:
            assert goal.size in race.sizes
            assert goal.ranks in race.ranks


def test_race_names_are_unique():
    for races in SETS.values():
        assert len({race.name for race in races}) == len(races)


SOME = Contestant("some", lc1.GLOO.make, ranks=(2,))


@pytest.mark.parametrize(
    ("sides", "goals", "said"),
    [
        ((lc1.GLOO,), (), "at least two contestants"),
        ((lc1.GLOO, lc1.GLOO), (), "different names"),
        ((lc1.GLOO, lc1.RING), (Goal("rign", 1.0, 4, 2),), "goals for"),
        ((SOME, lc1.RING), (), "must run at every size"),
    ],
)
def test_a_race_that_is_not_one_is_refused(sides, goals, said):
    with pytest.raises(ValueError, match=said):
        Race("wrong", "Wrong", sides, sizes=(4,), goals=goals)
