"""The tables and figures of lc3: drawn from runs, and refused when a run disagrees."""

import re

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc3 import figures, runs_training, tables
from xtrain_docs.lectures.lc3 import runs as lc3_runs

SYMBOLS = (
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.buckets:ShardedBucket",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.flat_param_group:FlatParamGroup",
)
MEMORY = ("xtrain.plan.memory:state_memory", "xtrain.plan.memory:zero_memory")


@pytest.mark.verifies(
    "xtrain.plan.memory:state_memory",
    "xtrain.zero.buckets:ShardedBucket",
    "xtrain.zero.flat_param_group:FlatParamGroup",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_held_equal_the_formula(on_ranks, ranks):
    for stage in tables.STAGES:
        for bf16 in (False, True):
            _, found = tables.bytes_held(stage, ranks, bf16)
            assert min(found.values()) > 0


def test_another_recipe_is_refused(on_ranks, monkeypatch):
    monkeypatch.setattr(tables, "recipe_of", lambda stage, bf16: "zero16")
    with pytest.raises(EvidenceError, match="stage 1, rank 0 of 2"):
        tables.bytes_held("1", 2)


@pytest.mark.verifies(*SYMBOLS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_sent_equal_the_formula(on_ranks, ranks):
    phi = 4 * runs_training.parameters_of_tower() * (ranks - 1) / ranks
    for stage, times in tables.PHIS.items():
        assert tables.payload(stage, ranks) / phi == pytest.approx(times, rel=1e-3)


def test_other_traffic_is_refused(on_ranks, monkeypatch):
    monkeypatch.setitem(tables.PHIS, "3", 2)
    with pytest.raises(EvidenceError, match="stage 3: sent"):
        tables.payload("3", 2)


@pytest.mark.verifies("xtrain.zero.optimizer:ZeroOptimizer")
def test_stage_2_frees_gradients_while_backward_runs(on_ranks):
    layer = 4 * runs_training.parameters_of_tower() // runs_training.LAYERS
    one, two = (
        runs.remembered(lc3_runs.gradients_alive, 2, stage, 144.5)[0] for stage in "12"
    )
    assert one == [layer * n for n in range(1, 7)]
    assert max(two) <= 2 * layer


@pytest.mark.verifies(
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.flat_param_group:FlatParamGroup",
)
def test_stage_3_has_two_layers_whole_at_most(on_ranks):
    layer = 4 * runs_training.parameters_of_tower() // runs_training.LAYERS
    freed, kept = (
        runs.remembered(lc3_runs.weights_alive, 2, stage)[0]
        for stage in ("3", "3 kept")
    )
    assert len(freed) == 2 * runs_training.LAYERS
    assert layer <= min(freed)
    assert max(freed) == 2 * layer
    assert max(kept) == runs_training.LAYERS * layer


def test_tables_are_whole(on_ranks):
    assert len(tables.zero_bytes(2).markdown()) == 6
    calls = {row[0]: row[1:] for row in tables.zero_calls(2).rows}
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
