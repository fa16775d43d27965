"""Records: what is written is read back, and what is damaged is refused by name."""

import dataclasses
import json
import re

import pytest

from xtrain.bench import race_record, race_sets
from xtrain.bench.race_record import ContestantResult, Measurement, Record
from xtrain.cli.bench import checkout

RESULT = ContestantResult(
    name="ring",
    seconds=0.002,
    seconds_low=0.001,
    seconds_high=0.003,
    kept=15,
    dropped=2,
    calls=4,
    ratio=1.25,
    ratio_low=1.2,
    ratio_high=1.3,
    goal=1.0,
    bytes_sent=[24, 24],
    bytes_formula=[24, 24],
    wire_bytes=None,
)
UNKNOWN = ("ratio", "ratio_low", "ratio_high", "goal", "bytes_sent", "bytes_formula")
BASELINE = dataclasses.replace(RESULT, name="gloo", **dict.fromkeys(UNKNOWN))
MEASUREMENT = Measurement(
    "all_reduce", "All-reduce", 24, 2, "gloo", 17, 0.01, [BASELINE, RESULT]
)
RECORD = Record(
    schema=race_record.SCHEMA,
    name="lc1",
    title="Lecture 1",
    date="2026-11-21",
    command="xtrain bench lc1",
    machine={"cores": 2, "cpu": "some CPU", "memory_bytes": 1},
    versions={"python": "3.13.1", "torch": "2.13.0", "xtrain": "0.1.0"},
    settings={"rounds": 15},
    measurements=[MEASUREMENT],
)


@pytest.fixture
def data():
    return dataclasses.asdict(RECORD)


def read(tmp_path, data):
    path = tmp_path / "lc1.json"
    path.write_text(json.dumps(data))
    return race_record.read(path)


def test_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "lc1.json"
    race_record.write(RECORD, path)
    assert race_record.read(path) == RECORD


def test_measurements_and_results_are_found_by_name():
    assert RECORD.measurement("all_reduce", 24, 2).result("ring") is RESULT
    with pytest.raises(ValueError, match="no measurement of 'all_reduce', 25 bytes"):
        RECORD.measurement("all_reduce", 25, 2)
    with pytest.raises(ValueError, match="no contestant 'tree'; there are: gloo, ring"):
        MEASUREMENT.result("tree")


def test_a_missing_field_is_named(tmp_path, data):
    del data["measurements"][0]["results"][1]["kept"]
    with pytest.raises(
        ValueError, match=r"measurements\[0\].results\[1\]: missing .'kept'"
    ):
        read(tmp_path, data)


def test_an_unknown_field_is_named(tmp_path, data):
    data["host"] = "somewhere"
    with pytest.raises(ValueError, match=r"unknown .'host'"):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", "fast"),
        ("kept", 1.5),
        ("dropped", None),
        ("name", 3),
        ("bytes_sent", [1, "2"]),
        ("calls", True),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path, data, field, value):
    data["measurements"][0]["results"][1][field] = value
    with pytest.raises(ValueError, match=rf"results\[1\]\.{field}"):
        read(tmp_path, data)


def test_another_schema_is_refused(tmp_path, data):
    data["schema"] = race_record.SCHEMA + 1
    with pytest.raises(ValueError, match="schema"):
        read(tmp_path, data)


COMMITTED = sorted((checkout() / "docs" / "data" / "bench").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_records_are_whole(path):
    """Read, and hold every measurement of today's races, with honest bytes."""
    found = race_record.read(path)
    assert re.fullmatch(rf"{found.name}(-\d+)?", path.stem)  # a machine each
    races = {race.name: race for race in race_sets.load(found.name).RACES}
    expected = {
        (race.name, size, ranks)
        for race in races.values()
        for size in race.sizes
        for ranks in race.ranks
    }
    assert {(h.race, h.size, h.ranks) for h in found.measurements} == expected
    for measurement in found.measurements:
        names = [c.name for c in races[measurement.race].contestants]
        assert measurement.results[0].name == names[0]
        assert {result.name for result in measurement.results} <= set(names)
        for result in measurement.results:
            assert result.kept + result.dropped == measurement.rounds
            if result.bytes_sent is not None:
                assert result.bytes_sent == result.bytes_formula
