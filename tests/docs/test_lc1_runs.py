"""The figures of lc1: drawn from runs. And what races look like as a drawing."""

import json
import re
import sys

import pytest

from xtrain.backends.nccl_rules.rules import RULES
from xtrain_docs import races as recorded
from xtrain_docs import runs
from xtrain_docs.figures import races
from xtrain_docs.lectures.lc1 import (
    deadlocks,
    groups_and_meshes,
    index,
    ledger,
    nccl_rules,
    sync_and_async,
)
from xtrain_docs.lectures.lc1.traces import REGISTRY
from xtrain_docs.runs import EvidenceError
from xtrain_docs.svg import Axis, bar_chart
from xtrain_docs.traces.record import encode

BEFORE_AFTER = {
    "broadcast": ["a0 a1", "a0 a1"],
    "reduce": ["Σ0 Σ1", "b0 b1"],
    "all_reduce": ["Σ0 Σ1", "Σ0 Σ1"],
    "gather": ["a0 b0", "- -"],
    "scatter": ["a0", "a1"],
    "all_gather_into_tensor": ["a0 b0", "a0 b0"],
    "reduce_scatter_tensor": ["Σ0", "Σ1"],
    "all_to_all_single": ["a0 b0", "a1 b1"],
}


@pytest.mark.parametrize("name", sorted(BEFORE_AFTER))
def test_before_and_after(on_ranks, name):
    drawing = index.before_after(name, ranks=2)
    for rank, held in enumerate(BEFORE_AFTER[name]):
        assert f"rank {rank}: " in drawing
        assert f"becomes {held}" in drawing


def test_a_sum_of_some_ranks_is_refused():
    assert index.label(0, 2) == ("", -1)
    assert index.label(encode(0, 1) + encode(1, 1), 2) == ("Σ1", 7)
    with pytest.raises(ValueError, match="only"):
        index.label(encode(0, 1) + encode(1, 1), 3)


def test_mesh_groups_have_one_colour_each():
    drawing = groups_and_meshes.mesh_groups((2, 4), "data,tensor", "tensor")
    assert "(0, 1, 2, 3), (4, 5, 6, 7)" in drawing
    assert drawing.count("xt-s0") == drawing.count("xt-s1") == 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts wire bytes")
def test_gloo_reduce_scatter_sends_an_all_reduce(world):
    if world(4).backend != "gloo":
        pytest.skip("about gloo")
    size = 2**20
    ours, theirs = (
        world(4).run(ledger.sent, "reduce-scatter", whose, size)
        for whose in (False, True)
    )
    assert sum(one["payload"] for one in ours) == 3 * size
    assert sum(one["wire"] for one in theirs) == pytest.approx(6 * size, rel=0.02)
    assert sum(one["wire"] for one in ours) == pytest.approx(3 * size, rel=0.02)


def test_bars_of_what_is_sent_are_as_long_as_what_was_counted(monkeypatch):
    def counted(function, ranks, name, theirs, size):
        return [{"payload": size, "wire": (1 + theirs) * size}] * ranks

    monkeypatch.setattr(runs, "remembered", counted)
    drawing = ledger.wire_bars()
    assert "reduce-scatter, ours, payload: 1.00 M" in drawing
    assert "reduce-scatter, gloo&#x27;s own, on the wire: 2.00 M" in drawing


def test_fresh_gradients_converge_and_old_ones_swing():
    for step in range(20):
        fresh = sync_and_async.stale_descent(0, 0.4, step)
        assert fresh == pytest.approx(0.6**step)
    assert sync_and_async.stale_descent(4, 0.4, 60) > 1 > fresh


@pytest.mark.parametrize("transcript", ["all_send_first", "nccl_first_use"])
def test_the_circle_of_waiting_ranks_is_the_one_in_the_report(transcript):
    drawing = deadlocks.wait_circle(f"wrong/lc1/{transcript}.out")
    for rank, peer in ((0, 1), (1, 2), (2, 0)):
        assert f"rank {rank} in send to rank {peer}" in drawing
    with pytest.raises(EvidenceError, match="no circle"):
        deadlocks.wait_circle("lc1/ring_shift.out")


def test_the_table_has_every_rule_of_nccl_with_its_source_written_out():
    rows = nccl_rules.nccl_rules().rows
    names = [re.match(r"`(.*?)`(, inferred)?$", row[0]) for row in rows]
    assert [found[1] for found in names] == [*RULES]
    assert [found[1] for found in names if found[2]] == [*nccl_rules.INFERRED]
    for name, text, source, cure in rows:
        assert text and cure, name
        places = source.split("; ")
        assert all(re.match(r"(`\w+\.\w+`|NCCL's guide): \S", p) for p in places), name


def test_one_shot_shows_its_messages(on_ranks):
    steps = REGISTRY["one_shot_all_reduce"](3).data["steps"]
    assert [len(step["messages"]) for step in steps] == [6]


def test_a_race_is_drawn_from_its_record(tmp_path, monkeypatch):
    def result(name, ratio):
        empty = dict.fromkeys(
            ("seconds", "seconds_low", "seconds_high", "ratio_low", "ratio_high",
             "goal", "bytes_sent", "bytes_formula", "wire_bytes"))  # fmt: skip
        return empty | {"name": name, "ratio": ratio, "kept": 9, "dropped": 0,
                        "calls": 1}  # fmt: skip

    measurement = {"race": "all_reduce", "title": "t", "size": 2**20, "ranks": 4,
            "backend": "gloo", "rounds": 9, "other_load": None,
            "results": [result("gloo all-reduce", None), result("ring", 1.25),
                        result("tree", 0.5)]}  # fmt: skip
    record = {"schema": 1, "name": "lc1", "title": "t", "date": "2026-11-21T00:00:00",
              "command": "xtrain bench lc1", "machine": {"cores": 2}, "versions": {},
              "settings": {}, "measurements": [measurement]}  # fmt: skip
    (tmp_path / "made-up.json").write_text(json.dumps(record))
    monkeypatch.setattr(recorded, "RECORDS", tmp_path)
    drawing = races.lc1_race("all_reduce", only="ring", record="made-up")
    assert "1 MiB, ring: 1.25x" in drawing
    assert "tree" not in drawing
    both = races.lc1_race("all_reduce", only="ring; tree", record="made-up")
    assert "1 MiB, tree: 0.50x" in both
    with pytest.raises(EvidenceError, match="no {'rings'}"):
        races.lc1_race("all_reduce", only="ring; rings", record="made-up")
    with pytest.raises(ValueError, match="no measurements of 'all_reduce' on 2 ranks"):
        races.lc1_race("all_reduce", 2, record="made-up")
    with pytest.raises(ValueError, match="no record none.json: `xtrain bench none`"):
        races.lc1_race("all_reduce", record="none")


def test_names_above_a_narrow_chart_take_as_many_rows_as_they_need():
    names = [f"contestant number {n}" for n in range(5)]
    bars = {"4 KiB": dict.fromkeys(names, 1.0)}
    drawing = bar_chart(bars, Axis("x"), "t", width=400)
    placed = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>contestant', drawing)
    assert len({y for _, y in placed}) > 1
    assert all(float(x) + 7 * len(names[0]) <= 400 for x, _ in placed)
