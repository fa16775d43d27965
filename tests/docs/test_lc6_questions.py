"""Tables and pictures of lc6: counted or computed, and refused where they disagree."""

import re

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import critical_pairs
from xtrain_docs.blocks import registry
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import balance, compare, hiding, interview

LECTURE = "lc6-context-parallel/"
TABLES, FIGURES = registry("table"), registry("figure")


def cells(name, *options):
    """A table's rows, which its Markdown can be made of."""
    table = TABLES[name](*options)
    assert table.markdown()
    return table.rows


# ----------------------------------------------------------------- computed by formula


def test_tokens_that_hide_a_ring_by_hardware():
    shown = page_rows(LECTURE + "ulysses-and-all-gather.md", "no mask")
    rows = {row[0]: row[1:] for row in shown}
    assert rows["H100, NVLink 4"] == ["2199", "4397", "550", "660", "5300"]
    assert rows["A100, NVLink 3"][:2] == ["1040", "2080"]
    nvlink, network = rows["H100, NVLink 4"], rows["H100, InfiniBand NDR"]
    assert int(network[2]) == pytest.approx(9 * int(nvlink[2]), abs=9)


def test_the_published_table_of_the_ring_attention_paper():
    """As computed, and within a hundredth of what the paper prints."""
    rows = page_rows(LECTURE + "ulysses-and-all-gather.md", "TFLOP/s")
    for row in rows:
        ours, printed = float(row[5].replace(" ", "")), float(row[6].split()[0])
        assert ours == pytest.approx(1000 * printed, rel=0.01)
    assert [row[3] for row in rows] == ["1040", "1098", "1026", "1054", "24 960"]
    assert [row[5] for row in rows] == ["6240", "6589", "6157", "6323", "149 760"]


def test_bytes_of_published_models():
    rows = page_rows(LECTURE + "ulysses-and-all-gather.md", "model")
    # 2 x 32 x 128 x 4096 elements of each of 4 ranks; see facts of llama-2-7b
    keys = 2 * 32768 * 32 * 128 * 2
    ring = 3 * keys + 3 * keys + 4 * 2 * keys
    assert rows[0][3] == f"{ring / 2**30:g} GiB"
    assert [row[0] for row in rows][::3] == ["llama-2-7b", "llama-3-8b", "llama-3-70b"]


def test_memory_of_a_cut_sequence_is_that_of_the_tokens_a_rank_has():
    """34 bytes a token and feature are kept of a layer, or its input in 16 bits."""
    whole, part = page_rows(LECTURE + "index.md", "activations of 32 layers")
    features = 32 * 131072 * 4096
    assert whole[1:] == [f"{n * features / 2**30:.3g} GiB" for n in (34, 2)]
    assert part == ["each of 8", "68 GiB", "4 GiB"]


def test_transfers_fall_below_the_block_with_more_tokens():
    drawing = FIGURES["transfer_over_compute"]()
    assert 'viewBox="0 0 390' in drawing
    assert drawing.count("<polyline") == 4
    least = hiding.least_tokens("h100", "nvlink4", causal=True)
    assert least == pytest.approx(2 * 989.4e12 / 450e9)


def test_values_on_pages():
    assert balance.zigzag_over_none(8, 65536) == pytest.approx(15 / 8, rel=1e-3)
    assert compare.ring_over_ulysses(4, 8, 8) == 2
    assert compare.ring_over_ulysses(8, 8, 8) == 4


# --------------------------------------------------------------------- counted in runs


def test_work_of_sixteen_tokens_on_four_ranks(on_ranks):
    assert cells("balance_by_rank") == [
        ["none", "10", "26", "42", "58", "58"],
        ["striped", "28", "32", "36", "40", "40"],
        ["zigzag", "34", "34", "34", "34", "34"],
    ]
    over = cells("balance_over_ideal", ((4, 16), (2, 64)))
    assert [row[6] for row in over[:3]] == ["1.706x", "1.176x", "1x"]
    assert [row[5] for row in over[3:]] == [
        str(critical_pairs(name, 2, 32)) for name in balance.BALANCES
    ]


def test_heat_maps_show_what_was_counted(on_ranks):
    drawing = FIGURES["causal_work"](2, 8)
    numbers = re.findall(r"<title>rank (\d), step (\d): (\d+) pairs</title>", drawing)
    assert numbers == [
        ("0", "0", "10"), ("0", "1", "0"), ("1", "0", "10"), ("1", "1", "16"),
        ("0", "0", "10"), ("0", "1", "6"), ("1", "0", "10"), ("1", "1", "10"),
        ("0", "0", "10"), ("0", "1", "8"), ("1", "0", "10"), ("1", "1", "8"),
    ]  # fmt: skip
    drawing = FIGURES["who_computes"]("striped", 2, 8)
    assert drawing.count("<title>query") == 36
    assert "<title>query 5, key 2: rank 1</title>" in drawing


def test_counted_work_that_is_not_the_closed_form_stops_the_build(
    on_ranks, monkeypatch
):
    monkeypatch.setattr(
        balance, "pairs_by_step", lambda name, ranks, local: [[10, 0], [10, 15]]
    )
    with pytest.raises(EvidenceError, match=r"none, rank 1: counted \[10, 16\]"):
        balance.balance_by_rank(2, 8)
    found = [[[1, 1]], [[0, 0]]]
    monkeypatch.setattr(balance.runs, "remembered", lambda *args: found)
    with pytest.raises(EvidenceError, match="exactly once"):
        balance.who_computes("none", 2, 2)


def test_bytes_of_three_ways_and_a_formula_that_differs(on_ranks, monkeypatch):
    rows = cells("context_bytes_measured", 4, 8)
    assert [row[2:4] for row in rows[:3]] == [
        ["24 576", "57 344"], ["24 576", "49 152"], ["12 288", "12 288"],
    ]  # fmt: skip
    monkeypatch.setattr(compare, "context_bytes", lambda *args, **kinds: (1, 1))
    for table in ("context_bytes_measured", "ring_volume"):
        with pytest.raises(EvidenceError, match=r"not \(1, 1\)"):
            TABLES[table]()


def test_volumes_and_scaling_of_a_ring(on_ranks):
    assert cells("ring_volume", 2, 64, (2, 4)) == [
        ["2", "1", "3", "4", "2"],
        ["4", "1.5", "3.5", "5", "6"],
    ]
    first, strong, weak = cells("strong_and_weak", 64, 2)
    assert [row[2:4] for row in (first, strong, weak)] == [
        ["2048", "1040"], ["3072", "520"], ["6144", "2064"],
    ]  # fmt: skip
    rows = cells("context_tensors", 8, 8, (2, 4))
    assert [row[2] for row in rows] == ["4.12"] * 6
    assert [row[3] for row in rows] == ["2", "2", "4", "8", "1", "1"]


def test_messages_and_mistakes(on_ranks, monkeypatch):
    assert cells("order_of_messages", 4) == [
        ["forward", "1", "2", "3", "3", "3"],
        ["backward", "1", "3", "5", "6", "7"],
    ]
    right, *wrong = cells("errors_of_model", 2, 8)
    assert right[1:] == ["none", "none"]
    assert all(int(row[2].removesuffix(" %")) > 5 for row in wrong)
    monkeypatch.setattr("xtrain_docs.lectures.lc6.runs_interview.CHANGES",
                        tuple(row[0] for row in wrong))  # fmt: skip
    with pytest.raises(EvidenceError, match="own count"):
        interview.errors_of_model(2, 8)
