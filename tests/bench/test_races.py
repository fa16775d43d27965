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
]
ONCE = replace(SHORT, rounds=1, most_rounds=1)  # results are checked before the rounds


@pytest.mark.verifies("xtrain.bench.race:Trial", "xtrain.bench.race:Contestant")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "race", [race for _, race in RACES], ids=[f"{n}-{r.name}" for n, r in RACES]
)
def test_race_is_correct_and_sends_what_the_plan_says(world, race, ranks):
    once = replace(race, rounds=1)  # also where a sample is a single call
    measurement = run_measurement(world(ranks), once, 4096, ONCE)
    assert [result.name for result in measurement.results] == [
        contestant.name
        for contestant in race.contestants
        if not contestant.ranks or ranks in contestant.ranks
    ]
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
            for wire, formula in zip(
                result.wire_bytes, result.bytes_formula, strict=True
            ):
                assert wire >= formula


@pytest.mark.parametrize("name", SETS)
def test_goals_belong_to_heats_that_are_run(name):
    for race in SETS[name]:
        for goal in race.goals:
            assert goal.size in race.sizes
            assert goal.ranks in race.ranks


def test_race_names_are_unique():
    for races in SETS.values():
        assert len({race.name for race in races}) == len(races)


def test_a_race_that_is_not_one_is_refused():
    with pytest.raises(ValueError, match="at least two contestants"):
        Race("alone", "Alone", (lc1.GLOO,), sizes=(4,))
    with pytest.raises(ValueError, match="different names"):
        Race("twins", "Twins", (lc1.GLOO, lc1.GLOO), sizes=(4,))
    with pytest.raises(ValueError, match="goals for"):
        Race(
            "goal",
            "Goal",
            (lc1.GLOO, lc1.RING),
            sizes=(4,),
            goals=(Goal("rign", 1.0, 4, 2),),
        )
    some = Contestant("some", lc1.GLOO.make, ranks=(2,))
    with pytest.raises(ValueError, match="must run at every size"):
        Race("baseline", "Baseline", (some, lc1.RING), sizes=(4,))
