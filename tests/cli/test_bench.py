"""`xtrain bench`: lists, chooses, prints, writes."""

import argparse
import dataclasses
import json
import os
import re

import pytest

from tests.bench import contestants
from tests.bench.test_record import MEASUREMENT, RESULT
from tests.bench.test_runner import SHORT
from xtrain import cli
from xtrain.bench import race_record, race_sets, report
from xtrain.bench.races import lc1
from xtrain.cli import bench
from xtrain.comm import ring_all_reduce


def test_list_shows_every_race(capsys):
    assert cli.main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for race in lc1.RACES:
        assert f"{race.name}: {race.title}" in shown
    assert "against gloo all-reduce" in shown


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("16MiB", 2**24), ("1GiB", 2**30), ("12", 12), ("8 b", 8)],
)
def test_sizes(text, size):
    assert bench.parse_size(text) == size


@pytest.mark.parametrize("text", ["16MB", "KiB", "1.5MiB", ""])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        bench.parse_size(text)


def test_choose_keeps_the_order_and_replaces_sizes_and_ranks():
    chosen = race_sets.choose(lc1.RACES, ["all_gather", "all_reduce"], [3], [12])
    assert [race.name for race in chosen] == ["all_reduce", "all_gather"]
    assert all(race.ranks == (3,) and race.sizes == (12,) for race in chosen)


def test_a_size_that_ranks_cannot_share_is_refused_in_one_line(capsys):
    words = ["bench", "lc1", "--quick", "--race", "reduce_scatter"]
    assert cli.main([*words, "--ranks", "3", "--sizes", "8"]) == 1
    written = capsys.readouterr().err
    assert written.strip() == (
        "not timed: 8 bytes are not a whole number of float32 on each of 3 ranks"
    )


@pytest.fixture
def short_races(monkeypatch):
    ring = contestants.all_reduce(ring_all_reduce, contestants.ring_traffic)
    monkeypatch.setattr(lc1, "RACES", [contestants.race_against_gloo(ring, ranks=(2,))])
    monkeypatch.setattr(bench, "Settings", lambda: SHORT)
    monkeypatch.setattr(bench, "QUICK", SHORT)


@pytest.mark.usefixtures("short_races")
def test_a_full_run_writes_the_record_of_the_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    assert cli.main(["bench", "lc1"]) == 0
    found = race_record.read(tmp_path / "docs" / "data" / "bench" / "lc1.json")
    assert found.command == "xtrain bench lc1"
    assert found.measurement("test", 400, 2).result("ring_all_reduce").kept == 2
    assert found.settings["other_load_limit"] == SHORT.other_load_limit
    assert "A test, 400 B, 2 ranks on gloo" in capsys.readouterr().out


@pytest.mark.usefixtures("short_races")
@pytest.mark.parametrize(
    "words", [["--quick"], ["--race", "test"], ["--ranks", "2"], ["--sizes", "400"]]
)
def test_a_part_of_a_run_writes_only_where_it_is_told(monkeypatch, tmp_path, words):
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    assert cli.main(["bench", "lc1", *words]) == 0
    assert not list(tmp_path.iterdir())
    path = tmp_path / "own.json"
    assert cli.main(["bench", "lc1", *words, "--output", str(path)]) == 0
    assert json.loads(path.read_text())["schema"] == race_record.SCHEMA


@pytest.mark.usefixtures("short_races")
def test_resume_runs_only_what_has_too_few_samples(monkeypatch, tmp_path, capsys):
    path = tmp_path / "own.json"
    words = ["bench", "lc1", "--sizes", "400,800", "--output", str(path)]
    assert cli.main(words) == 0
    data = json.loads(path.read_text())
    data["measurements"][0]["title"] = "as it was"
    data["measurements"][1]["title"] = "as it was"
    data["measurements"][1]["results"][1]["kept"] = 1
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.main([*words, "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "800 B" in shown
    assert "400 B" not in shown
    kept, again = race_record.read(path).measurements
    assert (kept.title, kept.size) == ("as it was", 400)
    assert (again.title, again.size) == ("A test", 800)


@pytest.mark.usefixtures("short_races")
def test_a_run_that_was_cut_leaves_the_record_alone_and_is_resumed(
    monkeypatch, tmp_path, capsys
):
    path = tmp_path / "own.json"
    path.write_text("the record of last week")
    words = ["bench", "lc1", "--sizes", "400,800", "--output", str(path)]
    run_measurement = bench.run_measurement

    def cut(world, race, size, settings, rough):
        if size == 800:
            raise KeyboardInterrupt
        return run_measurement(world, race, size, settings, rough)

    monkeypatch.setattr(bench, "run_measurement", cut)
    assert cli.main(words) == 130
    assert path.read_text() == "the record of last week"
    monkeypatch.setattr(bench, "run_measurement", run_measurement)
    capsys.readouterr()
    assert cli.main([*words, "--resume"]) == 0
    assert "400 B" not in capsys.readouterr().out
    assert [
        measurement.size for measurement in race_record.read(path).measurements
    ] == [400, 800]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("short_races")
@pytest.mark.parametrize("what", ["machine", "versions", "settings"])
def test_resume_refuses_a_record_made_otherwise(tmp_path, capsys, what):
    path = tmp_path / "own.json"
    words = ["bench", "lc1", "--output", str(path)]
    assert cli.main([*words, "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert cli.main(words) == 0
    data = json.loads(path.read_text())
    data[what]["cores"] = 3
    path.write_text(json.dumps(data))
    before = path.read_text()
    assert cli.main([*words, "--resume"]) == 2
    assert f"its {what} is" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_refused_race_ends_with_its_reason(monkeypatch, tmp_path, capsys):
    wrong = contestants.all_reduce(contestants.forgets_to_communicate)
    race = contestants.race_against_gloo(wrong, ranks=(2,))
    monkeypatch.setattr(lc1, "RACES", [race])
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    assert cli.main(["bench", "lc1"]) == 1
    written = capsys.readouterr().err
    assert "not timed: test: forgets_to_communicate, 400 bytes: rank 0" in written
    assert "Traceback" not in written
    assert not list(tmp_path.iterdir())


def test_report_shows_ratio_spread_bytes_and_goal():
    header, names, baseline, ring = report.measurement_lines(MEASUREMENT)
    assert header == "All-reduce, 24 B, 2 ranks on gloo"
    assert names.split()[:3] == ["contestant", "time", "ratio"]
    assert baseline.split()[:4] == ["gloo", "2", "ms", "1.00x"]
    assert "1.25x" in ring
    assert "1.20-1.30" in ring
    assert "24 B = formula" in ring
    assert "2 of 17" in ring
    assert "goal 1x: met" in ring


def test_report_says_what_was_not_measured():
    none = dict.fromkeys(("seconds", "ratio", "ratio_low", "ratio_high"))
    lost = dataclasses.replace(RESULT, **none)
    assert report.goal_text(lost) == "goal 1x: not measured"


def test_a_record_of_another_machine_stands_beside_the_first(tmp_path):
    paths = []
    for _ in range(3):
        paths.append(race_record.new_output(tmp_path, "lc1", another=True))
        paths[-1].write_text("{}")
    assert [path.name for path in paths] == ["lc1.json", "lc1-2.json", "lc1-3.json"]
    assert race_record.new_output(tmp_path, "lc1", another=False).name == "lc1.json"


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
@pytest.mark.usefixtures("short_races")
def test_a_quick_look_at_a_busy_machine_has_numbers_and_a_caveat(monkeypatch, capsys):
    busy = dataclasses.replace(SHORT, other_load_limit=-1.0)  # all samples are above
    monkeypatch.setattr(bench, "QUICK", busy)
    assert cli.main(["bench", "lc1", "--quick"]) == 0
    header, _, *rows, caveat = capsys.readouterr().out.strip().splitlines()
    assert "A test, 400 B" in header and len(rows) == 2
    for row in rows:
        assert re.search(r"\d (us|ms|s) +\d", row) and "0 of 2" in row
    assert re.fullmatch(r"  rough: other processes used \d+% of the machine", caveat)
    monkeypatch.setattr(bench, "QUICK", SHORT)
    assert cli.main(["bench", "lc1", "--quick"]) == 0
    assert "rough" not in capsys.readouterr().out
