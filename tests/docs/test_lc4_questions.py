"""Tables of the errata and the questions of lc4: drawn from runs, checked by hand."""

import pytest

from xtrain.plan import (
    ACCELERATORS,
    ModelShape,
    activation_memory,
    nccl_hop_seconds,
)
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import interview, interview_calls, interview_memory
from xtrain_docs.lectures.lc4.pays import layer_times

LAYERS = (
    "xtrain.tensor_parallel.linear:ColumnParallelLinear",
    "xtrain.tensor_parallel.linear:RowParallelLinear",
)


@pytest.mark.verifies(*LAYERS)
def test_calls_are_recorded_and_others_are_refused(on_ranks, monkeypatch):
    rows = {row[0]: row[1:] for row in interview_calls.calls_of_linear_layers(2).rows}
    assert rows["column"] == ["nothing", "all-reduce of `dx`"]
    assert rows["row"] == ["all-reduce of `y`", "nothing"]
    columns = interview_calls.calls_of_linear_layers(2, show="columns").rows
    others = interview_calls.calls_of_linear_layers(2, show="others").rows
    assert len(columns) == 2
    assert columns + others == interview_calls.calls_of_linear_layers(2).rows
    monkeypatch.setitem(interview_calls.EXPECTED, "column", ([("all-gather", "y")], []))
    with pytest.raises(EvidenceError, match="column on 2 ranks"):
        interview_calls.calls_of_linear_layers(2)


def test_bytes_of_the_two_designs_and_of_a_layer(on_ranks):
    bytes_of = [row[-1] for row in interview_calls.bytes_of_two_mlps(2).rows]
    assert [int(words.replace("\u00a0", "")) for words in bytes_of] == [
        576 * n for n in (5, 10, 2, 2)
    ]
    rows = {row[0]: row[1:] for row in interview_calls.sums_per_layer(2).rows}
    assert rows["tensor parallelism"][:2] == ["2 all-reduce", "2 all-reduce"]
    assert rows["tensor parallelism"][3].startswith("$8\\,")
    assert rows["the same, all recomputed"][3].startswith("$12\\,")
    # 10 for activations, and the gradients of two norm weights: 4 h of 288 elements.
    assert rows["with slices of the sequence"][3].startswith("$10.33\\,")


def test_what_is_kept_shrinks_by_the_ranks(on_ranks):
    alone, with_sequence = interview_memory.bytes_kept_by_layer(2).rows
    assert alone[1] == with_sequence[1]
    assert alone[-1] == "63 %"
    assert with_sequence[-1] == "50 %"


def test_tokens_double_the_one_and_width_the_other(on_ranks):
    tensor, zero = interview_calls.activations_or_weights(2).rows
    assert [tensor[0], *tensor[2:]] == ["tensor parallelism", "2x", "2x"]
    assert [zero[0], zero[2]] == ["ZeRO-3", "1x"]
    assert float(zero[3].removesuffix("x")) > 3.8


def test_a_layers_sums_and_matrices_take_the_seconds_of_the_formulas():
    shape = ModelShape.preset("llama-3-70b")
    work, sums = layer_times("llama-3-70b", 1024, 8, "nvlink4")
    moved = 2 * 7 / 8 * 1024 * 8192 * 2
    hop = nccl_hop_seconds(False)
    assert sums == pytest.approx(4 * (14 * hop + moved / 450e9))
    matrices = 6 * (shape.layer_parameters - 2 * 8192)
    attention = 3 * 4 * 8192 * 1025 / 2  # causal: half of the pairs
    rate = ACCELERATORS["h100"].matmul
    assert work == pytest.approx((matrices + attention) * 1024 / 8 / rate)
    switch = interview.seconds_if_the_switch_adds("llama-3-70b", 1024)
    assert switch == pytest.approx(4 * (2 * hop + 1024 * 8192 * 2 / 450e9))
    shares = {row[0]: row[-1] for row in interview.seconds_of_tensor_parallelism().rows}
    assert shares["NVLink 4, in a node"] and not shares["InfiniBand NDR"]


def test_tables_without_runs_are_whole():
    rows = interview_memory.activations_of_gpt_3().rows
    assert [len(row) for row in rows] == [4] * 3
    whole = activation_memory(2048, 1, 12288, 96)
    assert rows[0][1] == f"{whole / 2**30:.3g} GiB"
    assert len(interview.seconds_of_tensor_parallelism().rows) == len(interview.LINKS)
    (_, *tensor), (_, *pipeline) = interview.tensor_or_pipeline().rows
    assert [tensor[0], pipeline[0]] == ["320", "2"]
    assert pipeline[1:3] == ["64 MiB", "128 MiB"]
    assert tensor[1] == "112 MiB"
