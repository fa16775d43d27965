"""The page of races of lecture 7: what is raced, and reasons of misses."""

import dataclasses

from tests.bench.test_record import MEASUREMENT, RECORD, RESULT
from xtrain_docs import races
from xtrain_docs.lectures.lc7 import race


def measured(race, load=0.5, **seconds):
    """A measurement in which each contestant took so many seconds."""
    baseline = next(iter(seconds.values()))
    results = [
        dataclasses.replace(
            RESULT, name=name, seconds=took, ratio=baseline / took, goal=None
        )
        for name, took in seconds.items()
    ]
    return dataclasses.replace(MEASUREMENT, race=race, results=results, other_load=load)


def test_the_table_of_layers_has_the_goals_sizes():
    rows = race.expert_races().rows
    assert [row[1:7] for row in rows[:2]] == [
        ["256", "64", "128", "64", "2", "64 KiB"],
        ["2048", "256", "512", "64", "2", "2 MiB"],
    ]
    assert [row[-1] for row in rows] == ["1", "1", "2", "2"]


def test_a_miss_has_a_reason_from_the_same_measurement():
    names = {"transformers, grouped_mm": 4e-3, "ours": 5e-3}
    said = race.reason(measured("transformers_few", **names))
    assert said.startswith("5 ms against 4 ms: the many small steps around")
    assert said.endswith("others used 50 % of the machine")
    said = race.reason(measured("loop_many", **{"masked loop": 0.15, "ours": 0.16}))
    assert "160 ms against 150 ms: each product is long" in said
    names = {"one after the other": 0.1, "overlapped": 0.09}
    said = race.reason(measured("overlap", None, **names))
    assert "of which 40 ms are delays; overlapping hides 10 ms" in said


def test_only_missed_goals_of_experts_are_listed(monkeypatch):
    found = measured("loop_few", **{"masked loop": 3.0, "ours": 2.0, "eager": 9.0})
    goals = [dataclasses.replace(r, goal=g) for r, g in
             zip(found.results, (None, 2.2, None), strict=True)]  # fmt: skip
    missed = dataclasses.replace(found, results=goals)
    met = dataclasses.replace(
        missed, results=[dataclasses.replace(r, ratio=2.5) for r in goals]
    )
    record = dataclasses.replace(RECORD, measurements=[missed, met])
    monkeypatch.setattr(races, "record", lambda name: record)
    assert [row[1:3] for row in race.expert_misses().rows] == [["2.2x", "1.5x"]]
    record = dataclasses.replace(RECORD, measurements=[met])
    monkeypatch.setattr(races, "record", lambda name: record)
    assert race.expert_misses().rows == [["nothing", "", "", ""]]
