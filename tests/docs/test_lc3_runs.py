"""The tables and figures of lc3: drawn from runs, and refused when a run disagrees."""

import re

import pytest

from xtrain_docs import runs, runs_lc3
from xtrain_docs.figures import lc3 as figures
from xtrain_docs.tables import lc3
from xtrain_docs.tables.lc1 import EvidenceError

SYMBOLS = (
    "xtrain.zero.stage12:ZeroOptimizer",
    "xtrain.zero.buckets:Bucket",
    "xtrain.zero.stage3:FullyShardedDataParallel",
    "xtrain.zero.shards:Shards",
)
MEMORY = ("xtrain.plan.memory:state_memory", "xtrain.plan.memory:zero_memory")


@pytest.mark.verifies(
    "xtrain.plan.memory:state_memory",
    "xtrain.zero.buckets:Bucket",
    "xtrain.zero.shards:Shards",
    "xtrain.zero.stage12:ZeroOptimizer",
    "xtrain.zero.stage3:FullyShardedDataParallel",
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_held_equal_the_formula(on_ranks, ranks):
    for stage in lc3.STAGES:
        for low in (False, True):
            _, found = lc3.held(stage, ranks, low)
            assert min(found.values()) > 0


def test_another_recipe_is_refused(on_ranks, monkeypatch):
    monkeypatch.setattr(lc3, "recipe_of", lambda stage, low: "zero16")
    with pytest.raises(EvidenceError, match="stage 1, rank 0 of 2"):
        lc3.held("1", 2)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_sent_equal_the_formula(on_ranks, ranks):
    phi = 4 * runs_lc3.parameters_of_tower() * (ranks - 1) / ranks
    for stage, times in lc3.PHIS.items():
        assert lc3.payload(stage, ranks) / phi == pytest.approx(times, rel=1e-3)


def test_other_traffic_is_refused(on_ranks, monkeypatch):
    monkeypatch.setitem(lc3.PHIS, "3", 2)
    with pytest.raises(EvidenceError, match="stage 3: sent"):
        lc3.payload("3", 2)


@pytest.mark.verifies("xtrain.zero.stage12:ZeroOptimizer")
def test_stage_2_frees_gradients_while_backward_runs(on_ranks):
    layer = 4 * runs_lc3.parameters_of_tower() // runs_lc3.LAYERS
    one, two = (
        runs.remembered(runs_lc3.gradients_alive, 2, stage, 144.5)[0] for stage in "12"
    )
    assert one == [layer * n for n in range(1, 7)]
    assert max(two) <= 2 * layer


@pytest.mark.verifies(
    "xtrain.zero.stage3:FullyShardedDataParallel", "xtrain.zero.shards:Shards"
)
def test_stage_3_has_two_layers_whole_at_most(on_ranks):
    layer = 4 * runs_lc3.parameters_of_tower() // runs_lc3.LAYERS
    freed, kept = (
        runs.remembered(runs_lc3.weights_alive, 2, stage)[0]
        for stage in ("3", "3 kept")
    )
    assert len(freed) == 2 * runs_lc3.LAYERS
    assert layer <= min(freed)
    assert max(freed) == 2 * layer
    assert max(kept) == runs_lc3.LAYERS * layer


def test_tables_are_whole(on_ranks):
    assert len(lc3.zero_bytes(2).markdown()) == 6
    assert len(lc3.zero_gigabytes().markdown()) == 6
    assert len(lc3.recipes().markdown()) == 6
    calls = {row[0]: row[1:] for row in lc3.zero_calls(2).rows}
    assert calls["plain data parallelism"] == ["1", "-", "-"]
    assert calls["stage 1"] == ["-", "1", "1"]
    assert calls["stage 3"] == ["-", "12", "6"]


def test_bars_are_as_long_as_their_bytes(on_ranks):
    drawing = figures.stacked(
        [("a", "formula", [100, 200, 100]), ("", "measured", [50, 50, 100])], "title"
    )
    widths = re.findall(r'width="([\d.]+)" height="18"', drawing)
    unit = (figures.WIDTH - figures.LEFT - 74) / 4
    expected = [unit, 2 * unit, unit, unit / 2, unit / 2, unit]
    assert [float(w) for w in widths] == pytest.approx(expected, abs=0.1)
    assert "a, formula: 400 bytes" in drawing


def test_figures_are_whole(on_ranks):
    for drawing in (figures.zero_picture(2), figures.zero_by_ranks(),
                    figures.gradients_alive(), figures.weights_alive()):  # fmt: skip
        assert drawing.startswith("<svg")
