"""The tables and figures of lc1: drawn from runs, and refused when a run disagrees."""

import dataclasses
import json
import operator
import re
import sys
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.docs.conftest import forget
from xtrain.comm.mesh import axis_ranks, mesh_coordinates
from xtrain.comm.reduce_op import divide_if_average, fold_into
from xtrain.comm.tree import _halve_and_double
from xtrain.evidence import store
from xtrain_docs import kept, runs
from xtrain_docs import races as recorded
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.figures import races
from xtrain_docs.lectures.lc1 import (
    cells,
    diagrams,
    figures,
    measured,
    staleness,
    tables,
)
from xtrain_docs.lectures.lc1 import runs as lc1_runs
from xtrain_docs.svg import Axis, bar_chart
from xtrain_docs.tables import REGISTRY


@pytest.fixture
def on_ranks(world, tmp_path, monkeypatch):
    """Runs happen on this session's ranks and are remembered for one test only."""
    if world(2).device != "cpu":
        pytest.skip("the pages' runs are made on CPUs")
    monkeypatch.setattr(runs, "_world", world)
    forget(monkeypatch, tmp_path)


# ---------------------------------------------------------------------- tables


@pytest.mark.verifies(
    "xtrain.comm.ledger:CommLedger", "xtrain.comm.message_rounds:message_rounds"
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_collective_sends_its_formula(on_ranks, ranks):
    for name, known in measured.MEASURED.items():
        if ranks % known.options.get("local_ranks", 1) == 0:
            found = measured.compare(name, ranks)
            assert max(found["sent"]) == found["formula"] > 0


def test_a_table_is_refused_when_run_and_formula_disagree(on_ranks, monkeypatch):
    wrong = dataclasses.replace(
        measured.MEASURED["ring_all_reduce"], formula="broadcast"
    )
    monkeypatch.setitem(measured.MEASURED, "ring_all_reduce", wrong)
    with pytest.raises(EvidenceError, match="ring_all_reduce, 3 ranks: sent"):
        measured.compare("ring_all_reduce", 3)


def test_rounds_are_compared_too(on_ranks, monkeypatch):
    # The same bytes as a ring all-gather on 2 of 2 ranks, in more rounds on 4.
    wrong = dataclasses.replace(
        measured.MEASURED["all_to_all"], formula="ring_reduce_scatter"
    )
    monkeypatch.setitem(measured.MEASURED, "all_to_all", wrong)
    with pytest.raises(EvidenceError, match="rounds"):
        measured.compare("all_to_all", 4)


def test_three_orders_of_a_ring_step(on_ranks):
    assert [tables.order_rounds("rank 0 first", n) for n in (2, 3, 4)] == [2, 6, 12]
    assert [tables.order_rounds("even first", n) for n in (2, 3, 4)] == [2, 6, 6]
    assert [tables.order_rounds("together", n) for n in (2, 3, 4)] == [1, 2, 3]


def test_tables_are_whole(on_ranks):
    for name in ("message_overhead", "barrier_rounds", "bytes_on_axes",
                 "all_collectives"):  # fmt: skip
        assert len(REGISTRY[name]().markdown()) > 3, name


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts wire bytes")
def test_gloo_reduce_scatter_sends_an_all_reduce(on_ranks, world):
    if world(4).backend != "gloo":
        pytest.skip("about gloo")
    size = 2**20
    ours = measured.wire("xtrain.ring_reduce_scatter", size // 4, 4)
    theirs = measured.wire("torch.reduce_scatter_tensor", size // 4, 4)
    assert sum(ours["payload"]) == 3 * size
    assert sum(theirs["wire"]) == pytest.approx(6 * size, rel=0.02)
    assert sum(ours["wire"]) == pytest.approx(3 * size, rel=0.02)


def test_runs_are_remembered_until_the_code_changes(on_ranks, monkeypatch, tmp_path):
    first = measured.sent("barrier", 1, 2)
    shelf = kept.shelf(tmp_path / "lc1_runs.json")
    ((name, entry),) = shelf.read().items()
    other = [{**entry.value[0], "sent": 123}, *entry.value[1:]]
    shelf.write({name: entry.with_value(other)})
    assert measured.sent("barrier", 1, 2)["sent"][0] == 123
    monkeypatch.setattr(store, "torch_minor", lambda: "9.9")
    assert measured.sent("barrier", 1, 2) == first


# --------------------------------------------------------------------- figures


BEFORE_AFTER = {
    "broadcast": ["a0 a1", "a0 a1"],
    "reduce": ["Σ0 Σ1", "b0 b1"],
    "all_reduce": ["Σ0 Σ1", "Σ0 Σ1"],
    "gather": ["a0 b0", "- -"],
    "scatter": ["a0", "a1"],
    "all_gather": ["a0 b0", "a0 b0"],
    "reduce_scatter": ["Σ0", "Σ1"],
    "all_to_all": ["a0 b0", "a1 b1"],
}


@pytest.mark.parametrize("name", sorted(BEFORE_AFTER))
def test_before_and_after(on_ranks, name):
    drawing = cells.before_after(name, ranks=2)
    for rank, held in enumerate(BEFORE_AFTER[name]):
        assert f"rank {rank}: " in drawing
        assert f"becomes {held}" in drawing


def test_a_cell_that_mixes_pieces_is_refused():
    assert cells.label(0, 2) == ("", -1)
    assert cells.label(0b0101, 2) == ("Σ0", 7)
    with pytest.raises(ValueError, match="mixes"):
        cells.label(0b0011, 2)
    with pytest.raises(ValueError, match="some ranks"):
        cells.label(0b001001, 3)


@pytest.mark.verifies(
    "xtrain.comm.mesh:mesh_coordinates", "xtrain.comm.mesh:axis_ranks"
)
@pytest.mark.parametrize("shape", [(8,), (2, 4), (3, 2), (2, 2, 2), (2, 3, 4, 1)])
def test_coordinates_and_groups_are_those_of_a_table_of_ranks(shape):
    table = torch.arange(torch.Size(shape).numel()).view(shape)
    for rank in range(table.numel()):
        place = mesh_coordinates(rank, shape)
        assert int(table[place]) == rank
        for axis in range(len(shape)):
            line = list(place)
            line[axis] = slice(None)
            assert axis_ranks(rank, shape, axis) == table[tuple(line)].tolist()


def test_mesh_groups_have_one_colour_each():
    drawing = cells.mesh_groups((2, 4), "data,tensor", "tensor")
    assert "(0, 1, 2, 3), (4, 5, 6, 7)" in drawing
    assert drawing.count("xt-s0") == drawing.count("xt-s1") == 4


FOLDS = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


@pytest.mark.verifies(
    "xtrain.comm.reduce_op:fold_into", "xtrain.comm.reduce_op:divide_if_average"
)
@pytest.mark.parametrize("op", FOLDS, ids=lambda op: op.name)
def test_folding_three_ranks_equals_plain_python(op):
    ranks = [[3, -5, 12], [6, 7, 10], [-1, 2, 9]]
    partial = torch.tensor(ranks[0])
    for other in ranks[1:]:
        fold_into(partial, torch.tensor(other), op)
    divide_if_average(partial, op, 3)
    expected = [fold(FOLDS[op], column) for column in zip(*ranks, strict=True)]
    assert partial.tolist() == expected


@pytest.mark.verifies(
    "xtrain.comm.reduce_op:fold_into", "xtrain.comm.reduce_op:divide_if_average"
)
def test_an_average_is_divided_once_at_the_end():
    partial = torch.tensor([1.0, 2.0])
    fold_into(partial, torch.tensor([3.0, 6.0]), ReduceOp.AVG)
    assert partial.tolist() == [4.0, 8.0]
    divide_if_average(partial, ReduceOp.AVG, 2)
    assert partial.tolist() == [2.0, 4.0]


def halve_and_double(numel: int) -> list[int]:
    """The telling tensor of this rank after halving and doubling."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = torch.arange(numel) * 10**rank
    _halve_and_double(flat, rank, size, ReduceOp.SUM, None)
    return flat.tolist()


@pytest.mark.verifies("xtrain.comm.tree:_halve_and_double")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 16])
def test_halving_and_doubling_sums_every_element(world, ranks, numel):
    if world(ranks).device != "cpu":
        pytest.skip("a private function, tried on CPUs")
    digits = sum(10**rank for rank in range(ranks))
    for result in world(ranks).run(halve_and_double, numel):
        assert result == [i * digits for i in range(numel)]


def test_fresh_gradients_converge_and_old_ones_swing():
    fresh = staleness.stale_descent(0, 0.4, 20)
    assert fresh == pytest.approx([0.6**step for step in range(21)])
    assert staleness.stale_descent(4, 0.4, 60)[-1] > 1 > fresh[-1]


def test_crossover_figures_name_the_place():
    assert "tree = ring: 460 KiB" in figures.when_ring(ranks=8)
    assert "tree = ring: about 203 MiB" in figures.nccl_choice()


def test_the_circle_of_waiting_ranks_is_the_one_in_the_report():
    drawing = diagrams.wait_circle("wrong/lc1/all_send_first.out")
    for rank, peer in ((0, 1), (1, 2), (2, 0)):
        assert f"rank {rank} in send to rank {peer}" in drawing
    with pytest.raises(EvidenceError, match="no circle"):
        diagrams.wait_circle("lc1/ring_shift.out")


def test_survivors_are_drawn_with_the_rank_they_named():
    drawing = diagrams.named_ranks("lc1/killed_rank.out")
    for fate in ("killed", "left", "stopped"):
        assert f"rank 2 {fate}: rank 0 names rank 2, rank 1 names rank 2" in drawing
    with pytest.raises(EvidenceError, match="no reports"):
        diagrams.named_ranks("lc1/ring_shift.out")


def test_bars_of_what_is_sent_are_as_long_as_what_was_counted(monkeypatch):
    def counted(name, numel, ranks):
        theirs = [2 * numel * 4] * ranks if name.startswith("torch.") else [numel * 4]
        return {"payload": [numel * 4] * ranks, "wire": theirs * (4 // len(theirs))}

    monkeypatch.setattr(diagrams, "wire", counted)
    drawing = diagrams.wire_bars()
    assert "reduce-scatter, ours, payload: 1.00 M" in drawing
    assert "reduce-scatter, gloo&#x27;s own, on the wire: 2.00 M" in drawing


def test_an_object_is_drawn_as_its_two_messages(on_ranks, world):
    sizes = world(2).run(lc1_runs.object_messages, 3)
    assert sizes[0][0] == 8
    assert sizes[0][1] > 8
    assert sizes[1] == []
    assert "a length of 8 bytes" in diagrams.messages_of_an_object(3)


# --------------------------------------------------------- traces and the races


def test_one_shot_shows_its_messages(on_ranks, world):
    results = world(3).run(lc1_runs.payload, "one_shot_all_reduce_by_p2p", 4, 0)
    assert [r["messages"] for r in results] == [2, 2, 2]


def test_a_race_without_a_record_says_so(tmp_path):
    drawing = races.lc1_race("all_reduce", record="none")
    assert "No recorded race yet" in drawing


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
    assert "No recorded race" in races.lc1_race("all_reduce", 2, record="made-up")


def test_names_above_a_narrow_chart_take_as_many_rows_as_they_need():
    names = [f"contestant number {n}" for n in range(5)]
    bars = {"4 KiB": dict.fromkeys(names, 1.0)}
    drawing = bar_chart(bars, Axis("x"), "t", width=400)
    placed = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>contestant', drawing)
    assert len({y for _, y in placed}) > 1
    assert all(float(x) + 7 * len(names[0]) <= 400 for x, _ in placed)
