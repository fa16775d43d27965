"""The tables of lc4: made from runs, and refused when a run disagrees."""

import re

import pytest

from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import runs as lc4_runs
from xtrain_docs.lectures.lc4 import tables
from xtrain_docs.lectures.lc4.dataflow import MODULES, rows_of
from xtrain_docs.lectures.lc4.dataflow_drawing import WIDTH, data_flow

NAMES = (
    "identity_all_reduce",
    "all_reduce_identity",
    "split_all_gather",
    "all_gather_split",
    "all_gather_reduce_scatter",
    "reduce_scatter_all_gather",
)
OPERATORS = [f"xtrain.comm.autograd:{name}" for name in NAMES]
FUNCTIONS = (
    "xtrain.comm.autograd:_IdentityAllReduce",
    "xtrain.comm.autograd:_AllReduceIdentity",
    "xtrain.comm.autograd:_AllGatherReduceScatter",
    "xtrain.comm.autograd:_ReduceScatterAllGather",
)
LINEAR = (
    "xtrain.tensor_parallel.linear:CutLinear",
    "xtrain.tensor_parallel.functions:_ColumnLinear",
    "xtrain.tensor_parallel.linear:ColumnParallelLinear",
    "xtrain.tensor_parallel.linear:RowParallelLinear",
)
LAYER = (
    "xtrain.tensor_parallel.attention:ParallelAttention",
    "xtrain.tensor_parallel.mlp:ParallelSwiGLU",
    "xtrain.tensor_parallel.norm:ParallelRMSNorm",
)
MODEL = "xtrain.model.decoder:XtrainModel"


@pytest.mark.verifies(*OPERATORS, *FUNCTIONS)
def test_every_collective_has_its_dual_and_sends_what_the_formula_says(on_ranks):
    for ranks in (2, 4):
        rows = {
            row[0].strip("`"): row[1].strip("`") for row in tables.duals(ranks).rows
        }
        assert set(rows) == set(NAMES) == set(lc4_runs.OPERATORS)
        assert all(rows[dual] == name for name, dual in rows.items())
        assert rows["identity_all_reduce"] == "all_reduce_identity"
    table = {row[0]: list(row[1:]) for row in tables.operators(4).rows}
    assert table["`identity_all_reduce` (f)"] == [
        "replicated → replicated", "nothing, 0",
        "partial → replicated", r"all-reduce, $2\frac{N-1}{N}M$",
    ]  # fmt: skip
    assert table["`reduce_scatter_all_gather`"] == [
        "partial → split", r"reduce-scatter, $\frac{N-1}{N}M$",
        "split → replicated", r"all-gather, $\frac{N-1}{N}M$",
    ]  # fmt: skip


def test_other_bytes_of_a_collective_are_refused(on_ranks, monkeypatch):
    monkeypatch.setitem(tables.ALGORITHMS, "all-gather", "ring_all_reduce")
    with pytest.raises(EvidenceError, match="all_gather_split forward: sent"):
        tables.operator("all_gather_split", 2)


@pytest.mark.verifies(*LINEAR)
def test_a_linear_layer_sends_in_each_mode_what_the_table_says(on_ranks):
    rows = {row[0]: list(row[1:3]) for row in tables.linear_calls(4).rows}
    assert rows == {
        "column": ["nothing", "all-reduce of $TK$"],
        "column, gathered": ["all-gather of $TO$", "all-reduce of $TK$"],
        "column, sequence": [
            "all-gather of $TK$", "all-gather of $TK$, reduce-scatter of $TK$"
        ],
        "row": ["all-reduce of $TO$", "nothing"],
        "row, splitting": ["all-reduce of $TO$", "all-gather of $TK$"],
        "row, sequence": ["reduce-scatter of $TO$",
            "all-reduce of $O$, all-gather of $TO$"],
    }  # fmt: skip


@pytest.mark.verifies(MODEL, "xtrain.model.parts:CutParts")
def test_all_parameters_but_the_norms_are_cut(on_ranks):
    rows = {row[0]: list(row[1:]) for row in tables.parameters_by_rank(4).rows}
    assert rows["norms"][0] == rows["norms"][1]
    assert [name for name, row in rows.items() if "whole" in row[2]] == ["norms"]
    assert 25 < float(rows["**together**"][2].split()[0]) < 25.2


@pytest.mark.verifies(*LAYER)
def test_sequence_parallelism_splits_what_tensor_parallelism_replicates(on_ranks):
    rows = {row[0]: list(row[1:]) for row in tables.activations_by_rank(2).rows}
    assert rows["x + attention"] == ["replicated [B, S, H]", "split [B, S/2, H]"]
    assert rows["gate, up"] == ["split [B, S, F/2]"] * 2


@pytest.mark.parametrize(("ranks", "parts"), [(2, "F/2"), (4, "F/4")])
def test_a_picture_says_what_the_table_declares_and_fits_a_phone(ranks, parts):
    for module in MODULES:
        drawing = data_flow(module, ranks)
        assert "min-width:0" in drawing
        assert re.search(r'viewBox="0 0 (\d+)', drawing)[1] == str(WIDTH)
        rows = rows_of(module, ranks)
        for kind in ("partial", "replicated"):
            boxes = sum(kind in (row.forward, row.backward) for row in rows)
            assert (boxes == 0) == (f">{kind}<" not in drawing)
    drawing = data_flow("swiglu", ranks)
    assert "f: nothing sent forward, all-reduce backward" in drawing
    assert "g: all-reduce forward, nothing sent backward" in drawing
    assert "x is replicated, its gradient partial" in drawing
    assert f"[B, S, {parts}]" in drawing
    assert drawing.count("identity_all_reduce") == 1
