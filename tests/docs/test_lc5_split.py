"""The picture and the tables on the split backward are what ran, or stop the build."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc5 import runs_split, split

SPLIT = "xtrain.pipeline_parallel.split_backward:SplitBackward"


def number(cell):
    return int(cell.replace(",", ""))


@pytest.mark.verifies(SPLIT)
def test_the_three_parts_of_linear_layers_are_equal_and_attention_has_no_third(
    on_ranks,
):
    linear, attention, together = ([number(c) for c in row[1:]] for row in (
        split.split_flops().rows))  # fmt: skip
    assert len(set(linear)) == 1
    assert attention == [attention[0], 2 * attention[0], 0]
    assert together == [a + b for a, b in zip(linear, attention, strict=True)]
    drawing = split.split_matmuls()
    assert drawing.count("<rect") == 3 * 7 + 2


@pytest.mark.verifies(SPLIT)
def test_less_is_kept_after_b_and_nothing_after_w(on_ranks):
    forward, between, after = (number(row[1]) for row in split.split_kept().rows)
    assert forward > between > after == 0


def test_with_fused_kernels_a_layer_keeps_as_much_until_w_as_until_b():
    assert split.kept_until_w("llama-3-8b") == split.kept_until_b("llama-3-8b")
    assert split.kept_until_w("llama-3-8b") == 139_264
    for preset in ("llama-2-7b", "llama-3-70b"):
        share = split.kept_until_w(preset) / split.kept_until_b(preset)
        assert 0.95 < share <= 1


@pytest.mark.verifies(SPLIT)
def test_torchs_walk_computes_the_matmuls_of_functions_twice_and_ours_none(on_ranks):
    (plain, cut) = split.split_counts().rows
    assert plain[1:] == ["18", "11 + 7", "11 + 7"]
    assert cut[1] == "18" and cut[3] == "11 + 7"
    both = [int(part) for part in cut[2].split(" + ")]
    assert sum(both) > 18


@pytest.mark.parametrize(
    ("drawn", "run", "found"),
    [
        ("split_flops", "matmuls_by_part", {"F": [], "B": [], "W": [["q_proj", 1]]}),
        ("split_matmuls", "matmuls_by_part", {"F": [["attention", 1]]}),
        ("split_kept", "bytes_kept", {"F": 10**6, "B": 10**5, "W": 0}),
        ("split_kept", "bytes_kept", {"F": 10**6, "B": 187_392, "W": 8}),
        (
            "split_counts",
            "matmuls_counted",
            {"one piece": 3, "torch B": 2, "torch W": 1, "B": 2, "W": 2},
        ),
    ],
)
def test_a_run_that_is_not_the_formula_stops_the_build(monkeypatch, drawn, run, found):
    assert hasattr(runs_split, run)
    monkeypatch.setattr(runs, "remembered", lambda *_: [found])
    with pytest.raises(EvidenceError):
        getattr(split, drawn)()
