"""What the pages read from a record: tables and numbers, on a record made up here."""

from dataclasses import replace

import pytest

from tests.bench.test_record import BASELINE, MEASUREMENT, RECORD, RESULT
from xtrain.bench import race_record
from xtrain_docs import races, values
from xtrain_docs.figures.races import lc1_race, training_race
from xtrain_docs.tables import races as tables
from xtrain_docs.tables import training_races as training

SLOW = replace(
    RESULT, name="tree", seconds=0.004, ratio=0.5, ratio_low=0.4, ratio_high=0.6
)
NONE = dict.fromkeys(("seconds", "ratio", "ratio_low", "ratio_high"))
LOST = replace(RESULT, name="lost", kept=0, dropped=17, **NONE)
MADE_UP = replace(
    RECORD,
    machine={"cores": 2, "cpu": "some CPU", "memory_bytes": 2**34, "system": "Linux 6"},
    settings={"rounds": 15, "sample_seconds": 0.1, "other_load_limit": 0.05},
    measurements=[replace(MEASUREMENT, results=[BASELINE, RESULT, SLOW, LOST])],
)


@pytest.fixture(autouse=True)
def made_up(monkeypatch, tmp_path):
    race_record.write(MADE_UP, tmp_path / "lc1.json")
    monkeypatch.setattr(races, "RECORDS", tmp_path)
    races.records.cache_clear()
    yield
    races.records.cache_clear()


def test_results_show_ratio_spread_and_dropped_samples():
    rows = tables.race_results("all_reduce", 2).rows
    assert rows[0] == ["24 bytes", "gloo", "2 ms", "1", "", "2 of 17"]
    assert rows[1] == ["", "ring", "2 ms", "**1.25x**", "1.20 to 1.30", "2 of 17"]
    assert rows[3] == ["", "lost", "", "not measured", "", "17 of 17"]


def test_a_ratio_outside_its_own_middle_half_is_marked_and_counted():
    assert values.evaluate('race_outside("lc1")') == "0"
    away = replace(RESULT, ratio=0.99, ratio_low=1.0, ratio_high=1.03)
    assert races.outside(away) and not races.outside(LOST)
    assert tables._spread(away) == "1.00 to 1.03, ratio outside"
    assert tables._spread(RESULT) == "1.20 to 1.30"
    assert values.evaluate('race_outside("lc1", False)') == "2"


def test_goals_are_met_missed_or_not_measured():
    verdicts = [row[-2:] for row in tables.race_goals().rows]
    missed = ["0.50x", "**missed**"]
    assert verdicts == [["1.25x", "met"], missed, ["not measured", ""]]


def test_what_was_lost_is_exactly_what_is_below_one():
    assert [row[3] for row in tables.race_lost().rows] == ["tree"]


def test_bytes_say_where_they_come_from():
    rows = tables.race_bytes("all_reduce", 24, 2).rows
    unknown = ["known to the backend only", "no messages of ours", "not counted"]
    assert rows[0][1:] == unknown
    assert rows[1] == ["ring", "24", "24", "not counted"]


def test_the_machine_is_described():
    rows = dict(tables.race_machine().rows)
    assert rows["machine"] == "2 cores, some CPU"
    assert rows["dropped"] == "23 of 68"
    assert rows["versions"] == "python 3.13.1, torch 2.13.0, xtrain 0.1.0"


def test_numbers_on_pages():
    ratio = values.evaluate("race_ratio('lc1', 'all_reduce', 'ring', 24, 2) | times")
    assert ratio == "1.25x"
    assert races.race_seconds("lc1", "all_reduce", "tree", 24, 2) == 0.004
    assert races.race_date("lc1") == "2026-11-21"


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("race_ratio('lc9', 'all_reduce', 'ring', 24, 2)", "xtrain bench lc9"),
        ("race_ratio('lc1', 'all_reduce', 'ring', 24, 3)", "no measurement"),
        ("race_ratio('lc1', 'all_reduce', 'star', 24, 2)", "no contestant 'star'"),
        ("race_ratio('lc1', 'all_reduce', 'lost', 24, 2)", "not measured"),
        ("race_wire('lc1', 'all_reduce', 'ring', 24, 2)", "not counted"),
    ],
)
def test_a_number_that_was_not_measured_stops_the_build(expression, why):
    with pytest.raises(values.ValuesError, match=why):
        values.evaluate(expression)


# ------------------------------------------------------------------ several machines


@pytest.fixture
def another(tmp_path):
    """The same races on a second machine, where the ring was slower; `tree` is new."""
    slower = replace(RESULT, ratio=0.8)
    measurements = [replace(MEASUREMENT, results=[BASELINE, slower])]
    facts = {"wake_seconds": 90e-6, "copy_bytes_per_second": 12e9}
    second = replace(MADE_UP, measurements=measurements, facts=facts)
    race_record.write(second, tmp_path / "lc1-2.json")
    races.records.cache_clear()


def test_a_number_on_a_page_is_the_range_over_all_machines(another):
    text = values.evaluate("race_ratio('lc1', 'all_reduce', 'ring', 24, 2) | times")
    assert text == "0.8x to 1.25x"
    text = values.evaluate("race_ratio('lc1', 'all_reduce', 'tree', 24, 2) | times")
    assert text == "0.5x"


def test_tables_have_a_column_for_every_machine(another):
    table = tables.race_results("all_reduce", 2)
    assert table.header[-2:] == ["dropped", "on machine 2"]
    assert [row[-1] for row in table.rows] == ["", "0.80x", "not raced", "not raced"]


def test_a_goal_is_met_where_every_machine_meets_it(another):
    ring = tables.race_goals().rows[0]
    assert ring[-2:] == ["1.25x, 0.80x", "**missed** on 1 of 2 machines"]


def test_machines_stand_side_by_side_with_what_they_are_like(another):
    table = tables.race_machine()
    assert table.header == ["", "machine 1", "machine 2"]
    rows = {name: cells for name, *cells in table.rows}
    waking = rows["waking a process, there and back"]
    assert waking == ["not recorded", "90 us"]
    assert rows["one core copies"] == ["not recorded", "12 GB/s"]


def test_the_drawing_shows_the_other_machines(another, tmp_path):
    drawing = lc1_race("all_reduce", 2)
    assert "strokes: other machines" in drawing
    (tmp_path / "lc1-2.json").unlink()
    races.records.cache_clear()
    assert "strokes" not in lc1_race("all_reduce", 2)


# ------------------------------------------------------------ whole training steps

STEPS = [
    replace(MEASUREMENT, race=f"x_{shape}", results=[BASELINE, RESULT, SLOW])
    for shape in reversed(training.SHAPES)
]


@pytest.fixture
def steps(tmp_path):
    def write(measurements):
        made = replace(MADE_UP, measurements=measurements)
        race_record.write(made, tmp_path / "steps.json")
        races.records.cache_clear()

    write(STEPS)
    return write


def test_steps_stand_below_each_other(steps):
    rows = training.training_results("steps", 2, "x_").rows
    assert [row[0] for row in rows if row[0]] == ["compute", "send", "small"]
    assert rows[1][1:4] == ["ring", "2 ms", "**1.25x**"]


def test_a_page_may_name_other_steps(steps):
    steps([replace(MEASUREMENT, race="x_small"), *STEPS[1:]])
    rows = training.training_results("steps", 2, "x_", "small; compute").rows
    assert [row[0] for row in rows if row[0]] == ["small", "compute"]
    drawing = training_race("steps", "x_", 2, steps="small")
    assert "small, ring: 1.25x" in drawing and "compute" not in drawing
    with pytest.raises(ValueError, match="x_tiny"):
        training.training_results("steps", 2, "x_", "tiny")


def test_a_missed_goal_shows_even_where_rounding_hides_it(steps):
    close, just = replace(RESULT, goal=1.2499), replace(SLOW, goal=0.5)
    on_four = [replace(measurement, ranks=4) for measurement in STEPS]
    steps([replace(m, results=[BASELINE, close, just]) for m in (*STEPS, *on_four)])
    rows = training.training_goals("steps", "x_").rows
    assert rows[0] == ["compute", "ring", "1.25x", "1.25x", "1.25x"]
    assert rows[1] == ["", "tree", "0.50x", "0.50x", "0.50x"]
    close = replace(RESULT, goal=1.2504)
    steps([replace(measurement, results=[BASELINE, close]) for measurement in STEPS])
    rows = training.training_goals("steps", "x_").rows
    assert rows[0] == ["compute", "ring", "1.25x", "**1.2500x, missed**"]


def test_bars_are_the_ratios_of_the_chosen(steps):
    drawing = training_race("steps", "x_", 2, only="tree")
    assert drawing.count("<rect") == 3
    assert "send, tree: 0.50x" in drawing
    with pytest.raises(ValueError, match="steps: no {'star'} in it"):
        training_race("steps", "x_", 2, only="tree; star")


def test_memory_is_that_of_the_busiest_rank(steps):
    def holding(result, *peaks):
        return replace(result, peak_bytes=[n * 2**20 for n in peaks])

    results = [holding(BASELINE, 400, 300), holding(RESULT, 100, 300)]
    steps([replace(STEPS[1], results=results)])
    rows = training.training_memory("steps", "x_").rows
    assert rows == [["gloo", "400 MiB", "1.00"], ["ring", "300 MiB", "0.75"]]
    steps([replace(STEPS[1], results=[results[0], RESULT])])
    with pytest.raises(ValueError, match="no peak of ring"):
        training.training_memory("steps", "x_")


def test_the_steps_are_those_of_the_races():
    rows = training.training_steps().rows
    assert [row[0] for row in rows] == ["compute", "send", "small"]
    assert [row[1] for row in rows] == ["4", "8", "4"]
